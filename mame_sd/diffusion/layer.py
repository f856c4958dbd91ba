"""The way of a call through a merging layer: decide, merge, call, restore.

`merged_call` is that way for every layer and for both ways into diffusers (hooks and the
processor), so they give the same numbers. A call is looked at once, by `AttentionAdapter.route`: it
gives the `Route` that all else takes, or says why the call is left alone. With `keep` the keys
merge within the call, where the processor calls attention (`mame_sd.core.keys`). With `tau` whole
tokens merge before it and are restored after it (`mame_sd.core.paper`). What differs between layers
is said by an `AttentionAdapter` (`families/attention.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.keys import Grid, KeyMerging, MergeJob, OwnKernel, SDPAInterceptor
from mame_sd.core.merge import DRAWS
from mame_sd.core.paper import Plan, plan_tokens
from mame_sd.diffusion.context import NO_STEP, Later, ResolvedConfig, Shared, Step, Tokens
from mame_sd.diffusion.interception import watch_kernels
from mame_sd.diffusion.rows import Rows, RowsMode, needs_all_rows, running_rows
from mame_sd.diffusion.threads import PerThread
from mame_sd.report import LayerStats
from mame_sd.upstream import outside_old_graphs, parameters_of

NO_SIZE = "height and width unknown: keys are compared along the sequence; give size=(h, w)"
LEFT = "left unmerged by layers"
KEEPS_ALL = "keep=1 keeps all keys"
UNSEEN = "{} calls no attention over the layer's tokens that can be intercepted"


class LayerCall(NamedTuple):
    """One call of a module, whose own forward is `forward`."""

    module: Any
    forward: Callable[..., Any]
    arguments: Mapping[str, Any]  # by name
    by_place: tuple[str, ...] = ()  # names of the arguments that came without one
    rest: tuple[Any, ...] = ()  # further arguments that have no name
    processor: Any = None
    kind: str = ""  # what attends: the processor's class, or the module's where it has none

    def run(self, **changes: Any) -> Any:
        """The module's own output, with `changes` of the arguments, each passed on as it came."""
        given = {**self.arguments, **changes}
        args = [given.pop(name) for name in self.by_place]
        return self.forward(*args, *self.rest, **given)


@dataclass(frozen=True)
class Route:
    """How a call merges: what is decided before anything is computed.

    Attributes:
        call: the call.
        config: the settings that hold for these tokens.
        tokens: how they lie.
        first: where they begin in the sequence of `call`'s tokens.
        before, after: tokens beside them that attention sees too, before and after them.
        note: what a report says where another way than the settings' is taken.
        run: computes the call while its keys merge, where that is not the call itself.
        merge_tokens: computes the call's output of tokens that merge by a plan (`tau`).
        feature: what similarity compares with `tau`, [B, n, d] of the n tokens that may merge.
        job: further fields of `MergeJob`.
    """

    call: LayerCall
    config: MaMeConfig
    tokens: Tokens
    first: int = 0
    before: int = 0
    after: int | None = 0
    note: str = ""
    run: Callable[[], Any] | None = None
    merge_tokens: Callable[[Route, Plan], Any] | None = None
    feature: Tensor | None = None
    job: Mapping[str, Any] = field(default_factory=dict)


class AttentionAdapter(ABC):
    """What one kind of module's calls look like to merging.

    Args:
        module: a module of that kind, whose forward names the arguments; the calls may come from
            copies of it.
    """

    hidden = "hidden_states"  # the argument that holds the tokens [B, L, C]

    def __init__(self, module: nn.Module | None = None) -> None:
        own = {} if module is None else parameters_of(type(module))
        self._names = tuple(p.name for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD)

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> LayerCall:
        """A call of `module`, whose own forward is `forward`."""
        names, processor = self._names[: len(args)], getattr(module, "processor", None)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        kind = type(module if processor is None else processor).__name__
        return LayerCall(module, forward, given, names, args[len(names) :], processor, kind)

    @abstractmethod
    def route(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Route | str:
        """How this call merges, or why it is left alone: the one place where that is decided.

        `known` is how the tokens lie, from the model around; None where nothing says it.
        """

    def count(self, call: LayerCall, known: Tokens | None) -> int:
        """Tokens of a call that is left alone; 0 where they are unknown."""
        hidden = call.arguments.get(self.hidden)
        return int(hidden.shape[1]) if isinstance(hidden, Tensor) and hidden.dim() > 1 else 0

    def plan(self, route: Route) -> Plan:
        """Which whole tokens of a call merge."""
        assert route.feature is not None
        return plan_tokens(route.feature, route.config)

    def job(self, route: Route, name: str, step: Step) -> MergeJob:
        """The merging of the keys of a call of the layer of that name."""
        config, tokens, start = route.config, route.tokens, route.before
        assert config.keep is not None
        grids = [Grid(start, tokens.size, config.keep)]
        behind = sum(math.prod(size) for size in tokens.references)
        if config.references is not None and behind <= (route.after or 0):
            start += tokens.count
            for size in tokens.references:
                grids.append(Grid(start, size, config.references))
                start += math.prod(size)
        length = None if route.after is None else route.before + tokens.count + route.after
        known, plans = None, step.plans
        if plans is not None and plans.latents() is not None:
            if plans.unsettled:
                plans.settle()
            plans.calls[name] += 1
            sizes = tuple(grid.size for grid in grids)
            known = plans.found.setdefault((name, plans.calls[name], config, sizes), {})
        how = KeyMerging(config.fit_queries, config.tile_size, config.seed)
        draw = step.draw if config.redraw else None
        leader = step.leader if config.share_guidance_plan else None
        return MergeJob(
            tuple(grids), length, route.first, how=how, draw=draw, leader=leader, known=known,
            **{"queries": tokens.count, **route.job},
        )  # fmt: skip


class Entry:
    """What stands in for the `forward` of a module with a MergeHook, in copies of it too.

    diffusers' registry binds a function of its own to each module. With such a one, a deepcopy
    would run the original's weights. `torch.compile` would also compile each repeated block by
    itself (`compile_repeated_blocks`). A method is one function for all of them.

    Args:
        hook: merges; None: it was taken off, but somebody holds this method still.
        inner: the module's own forward.

    Attributes:
        bare: whether that was its class's, which may have become another's since (tomesd's patch).
    """

    bare = False

    def __init__(self, module: nn.Module, hook: Any, inner: Callable[..., Any]) -> None:
        self.module, self.inner = module, inner
        self.hook = hook

    def __setstate__(self, values: dict[str, Any]) -> None:
        """A model that was saved whole merges where nobody has called `apply_mame`."""
        vars(self).update(values)
        watch_kernels()

    @outside_old_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, merged where that is sound."""
        hook: MergeHook | None = self.hook
        if hook is None:
            return self.inner(*args, **kwargs)
        shared, stats = hook.shared, hook.stats
        setting = hook.setting
        if not setting.active and hook.instead is None:
            return self.inner(*args, **kwargs)
        call = hook.layer.call(self.module, self.inner, args, kwargs)
        if hook.instead is not None:
            return hook.instead(call)
        config: MaMeConfig | None = setting.config
        if setting.of_layer:  # a name would be a constant of each compiled block
            config = setting.of_layer.get(stats.name, config)
        if config is None:
            stats.skipped(LEFT, hook.layer.count(call, hook.layout()))
            return call.run()
        return merged_call(hook.layer, call, hook.layout(), config, stats, hook.step, shared.kernel)


class LayerHook:
    """What hooks around a layer share: settings, counters, the tokens' layout and the step.

    Args:
        shared: what the hooks of a handle share.
        stats: counters of the layer.
        known: how the tokens lie in each thread's latest call of the model; None: unknown.
        number: of the layer in its model, from 0. Neighbours take different draws in one step, so
            that their errors do not add up.
    """

    name: str
    entry: Any = None  # what stands in for the module's forward, an Entry's

    def __init__(
        self, shared: Shared, stats: LayerStats, known: PerThread | None, number: int = 0
    ) -> None:
        self.place = number % DRAWS
        # Of no dimension: for any device, and no constant of a compiled graph.
        self.number = torch.tensor(number)
        self.shared = shared
        self.stats = stats
        self.known = known

    @property
    def setting(self) -> ResolvedConfig:
        """The setting in force."""
        own = self.shared.own  # read here as `Shared.now` reads it, which costs no call
        mine = getattr(own.mine, "value", None) if torch.compiler.is_compiling() else own.var.get()
        setting: ResolvedConfig = mine[-1] if mine else self.shared.setting
        return setting

    def layout(self) -> Tokens | None:
        """How the tokens lie in this thread's latest call of the model; None: unknown."""
        known = self.known
        return None if known is None else getattr(known.mine, "value", known.latest)

    def step(self) -> Step:
        """What this thread's latest call of the model says of the step.

        A call gives the same with gradients as without them, but for plans, which it shares with
        none. Where the model checkpoints gradients there is no step: a block that is computed
        again merges as before, whatever has run since (`StepHook`).

        Raises RuntimeError in a block that is computed again after a call at another timestep.
        """
        shared, plans = self.shared, None
        own: Step | Later | None = getattr(shared.step.mine, "value", None)
        step: Step | Later | None = shared.step.latest if own is None else own
        if isinstance(step, Later):
            plans = None if own is None else step.plans
            step = step.made or step.step()
        if step is None or step is NO_STEP:
            return NO_STEP
        learns = torch.is_grad_enabled()
        if torch.compiler.is_compiling():  # a number would be a constant of the graph
            draw = None if step.draw is None else (step.draw + self.number) % DRAWS
            return Step(draw, leader=step.leader)  # a graph holds no plans
        draw = None if step.draws is None else step.draws[self.place : self.place + 1]
        if learns and torch._C._current_graph_task_id() >= 0:  # in a backward pass
            shared.learning.again()
        return Step(draw, leader=step.leader, plans=None if learns else plans)


class MergeHook(LayerHook):
    """Merges around one layer, also in deepcopies of the module.

    Args:
        shared, stats, known, number: as for `LayerHook`.
        layer: the kind of module.
    """

    name = "mame"
    instead: Callable[[LayerCall], Any] | None = None  # computes calls while calibration measures

    def __init__(
        self,
        shared: Shared,
        stats: LayerStats,
        layer: AttentionAdapter,
        known: PerThread | None,
        number: int = 0,
    ) -> None:
        super().__init__(shared, stats, known, number)
        self.layer = layer

    def put(self, module: nn.Module, inner: Callable[..., Any]) -> Any:
        """What is to stand in for `inner`, the own forward of a module."""
        self.entry = Entry(module, self, inner).forward
        return self.entry


def merged_call(
    layer: AttentionAdapter,
    call: LayerCall,
    known: Tokens | None,
    config: MaMeConfig,
    stats: LayerStats,
    step: Callable[[], Step] = lambda: NO_STEP,
    kernel: OwnKernel | None = None,
) -> Any:
    """The output of `call`, merged where that is sound, and counted; `step` is asked where keys
    merge, the other arguments are those of `route` and `Shared`.
    """
    rows = running_rows()
    if rows is not None and needs_all_rows(call.module):
        with RowsMode(None):
            return merged_call(layer, call, known, config, stats, step, kernel)
    route = layer.route(call, known, config)
    keeps_all = config.keep == 1 and config.tau is None and config.references is None
    if isinstance(route, str) or keeps_all:
        why = route if isinstance(route, str) else KEEPS_ALL
        stats.skipped(why, layer.count(call, known))
        if rows is not None and config.tau is None:
            route = layer.route(call, known, of_all_keys(config))
        if rows is None or isinstance(route, str):
            return call.run()
        return _of_some_queries(layer, route, rows, stats, kernel)
    size = route.tokens.size
    if config.tau is not None:
        assert route.merge_tokens is not None
        plan = layer.plan(route)
        stats.merged((plan,), size, route.note)
        return route.merge_tokens(route, plan)
    job = layer.job(route, stats.name, step())
    job.kernel = kernel
    job.rows = None if rows is None else rows.chosen.at
    with SDPAInterceptor(job):
        output = call.run() if route.run is None else route.run()
    if job.merged is None:
        stats.skipped(job.left or UNSEEN.format(call.kind), route.tokens.count)
    else:
        note = "; ".join(filter(None, (route.note, job.note)))
        stats.merged(job.merged.groups, size, note)
    return output


def _of_some_queries(
    layer: AttentionAdapter,
    route: Route,
    rows: Rows,
    stats: LayerStats,
    kernel: OwnKernel | None,
) -> Any:
    """Return the output of a call whose keys stay, computed for some queries alone."""
    job = layer.job(route, stats.name, NO_STEP)
    job.merges, job.kernel, job.rows = False, kernel, rows.chosen.at
    with SDPAInterceptor(job):
        return route.call.run() if route.run is None else route.run()


def of_all_keys(config: MaMeConfig) -> MaMeConfig:
    """Return `config` for layers of any size, whose keys all stay."""
    make = _of_all_keys  # torch.compile warns of caches
    return make.__wrapped__(config) if torch.compiler.is_compiling() else make(config)


@lru_cache(maxsize=64)
def _of_all_keys(config: MaMeConfig) -> MaMeConfig:
    return config.replace(keep=1, min_tokens=1)
