"""Run a call through a merging layer: decide, merge, call, restore.

`merged_call` does this for every layer and for both ways into diffusers (hooks and the processor),
so that both give the same numbers. `AttentionAdapter.route` inspects a call once: it returns
`MergeKeys`, `MergeTokens` or `Skip`, which everything else reads. With `keep` the keys merge within
the call, where the processor calls attention (`mame_sd.core.intercept`). With `tau` whole tokens
merge before the call and are restored after it (`mame_sd.core.paper`). An `AttentionAdapter` holds
what differs between layers (`families/attention.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mame_sd.compat import outside_old_graphs, parameters_of
from mame_sd.config import MaMeConfig
from mame_sd.core.cells import DRAWS
from mame_sd.core.groups import all_text
from mame_sd.core.intercept import KernelAdapter, MergeJob, SDPAInterceptor
from mame_sd.core.merge_keys import Grid, KeyMerging
from mame_sd.core.paper import Plan, plan_tokens
from mame_sd.diffusion.attention_backends import watch_kernels
from mame_sd.diffusion.context import NO_STEP, HandleState, LazyStep, ResolvedConfig, Step, Tokens
from mame_sd.diffusion.rows import Rows, RowsMode, needs_all_rows, running_rows
from mame_sd.diffusion.threads import PerThread
from mame_sd.report import ADDING, NEVER_CALLED, Sums, counted

NO_SIZE = "height and width unknown: keys are compared along the sequence; give size=(h, w)"
LEFT = "left unmerged by layers"
KEEPS_ALL = "keep=1 keeps all keys"
EVERY = MaMeConfig(keep=1, min_tokens=1)  # of calls that are intercepted without merging
UNSEEN = "{} calls no attention over the layer's tokens that can be intercepted"


class LayerCall(NamedTuple):
    """Describe one call of a module, whose own forward is `forward`."""

    module: Any
    forward: Callable[..., Any]
    arguments: Mapping[str, Any]  # by name
    by_place: tuple[str, ...] = ()  # names of the positional arguments
    rest: tuple[Any, ...] = ()  # further positional arguments, without names
    processor: Any = None
    kind: str = ""  # class name of the processor, or of the module if it has none

    def run(self, **changes: Any) -> Any:
        """Return the module's own output, with `changes` of the arguments.

        Each argument is passed by position or by name, as in the original call.
        """
        arguments = {**self.arguments, **changes}
        args = [arguments.pop(name) for name in self.by_place]
        return self.forward(*args, *self.rest, **arguments)


@dataclass(frozen=True)
class Skip:
    """A call that is not merged, with the reason for the report."""

    reason: str


@dataclass(frozen=True)
class MergeTokens:
    """A call whose whole tokens merge before it (`tau`).

    Attributes:
        call: the call.
        config: the settings for these tokens.
        tokens: layout of the tokens.
        first: position of the first token in the sequence of `call`.
        feature: the feature that similarity compares, [B, n, d] of the n tokens that may merge.
    """

    call: LayerCall
    config: MaMeConfig
    tokens: Tokens
    first: int
    feature: Tensor


@dataclass(frozen=True)
class MergeKeys:
    """A call whose keys merge within it (`keep`).

    Attributes:
        call: the call.
        config: the settings for these tokens.
        tokens: layout of the tokens.
        first: position of the first token in the sequence of `call`.
        before: number of other keys before those of the tokens.
        after: number of other keys after those of the tokens. If None, any number.
        note: text for the report if the call merges otherwise than the settings say.
        run: computes the call while its keys merge. If None, the call itself does.
        job: further fields of `MergeJob`.
    """

    call: LayerCall
    config: MaMeConfig
    tokens: Tokens
    first: int
    before: int
    after: int | None
    note: str = ""
    run: Callable[[], Any] | None = None
    job: Mapping[str, Any] = field(default_factory=dict)


Route = MergeKeys | MergeTokens | Skip


class AttentionAdapter(ABC):
    """Translate the calls of one kind of module for merging.

    Args:
        module: a module of that kind, whose forward has the names of the arguments. Calls may come
            from copies of it.
    """

    hidden = "hidden_states"  # the argument that holds the tokens [B, L, C]
    repeats_text = False  # True if texts may end in equal tokens

    def __init__(self, module: nn.Module | None = None) -> None:
        parameters = {} if module is None else parameters_of(type(module))
        self._names = tuple(
            p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
        )

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> LayerCall:
        """Return a call of a module with its arguments by name.

        Args:
            module: the called module.
            forward: the module's own forward.
            args: positional arguments of the call.
            kwargs: named arguments of the call.
        """
        names, processor = self._names[: len(args)], getattr(module, "processor", None)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        kind = type(module if processor is None else processor).__name__
        return LayerCall(module, forward, arguments, names, args[len(names) :], processor, kind)

    @abstractmethod
    def route(self, call: LayerCall, layout: Tokens | None, config: MaMeConfig) -> Route:
        """Decide how a call merges. No other place decides this.

        Args:
            call: the call of the module.
            layout: layout of the tokens, read from the model's call. If None, it is unknown.
            config: the settings.

        Returns:
            How the call merges, or the reason why it doesn't.
        """

    @abstractmethod
    def with_merged_tokens(self, route: MergeTokens, plan: Plan) -> Any:
        """Return the output of a call whose tokens merge by a plan and are restored after it."""

    def count(self, call: LayerCall, layout: Tokens | None) -> int:
        """Return the number of tokens of a call that is not merged, or 0 if it is unknown."""
        hidden = call.arguments.get(self.hidden)
        return int(hidden.shape[1]) if isinstance(hidden, Tensor) and hidden.dim() > 1 else 0

    def with_one_of_equal(
        self, call: LayerCall, layout: Tokens | None, kernel: KernelAdapter | None
    ) -> tuple[LayerCall, int] | None:
        """Return a call with one of the equal tokens at the end of its text, and their number.

        Args:
            call: the call.
            layout: as for `route`.
            kernel: computes attention over merged keys instead of the model's own kernel.

        Returns:
            None if there are no such tokens, or attention can't count one of them for all.
        """
        return None

    def plan(self, route: MergeTokens) -> Plan:
        """Plan which whole tokens of a call merge."""
        assert route.config.tau is not None
        return plan_tokens(route.feature, route.config.tau)

    def job(self, route: MergeKeys, name: str, step: Step) -> MergeJob:
        """Make the job that merges the keys of a call.

        Args:
            route: how the call merges.
            name: name of the layer.
            step: the step of the model's call.
        """
        config, tokens, start = route.config, route.tokens, route.before
        assert config.keep is not None
        grids = [Grid(start, tokens.size, config.keep)]
        share = config.reference_share if tokens.references else None
        count = 0 if share is None else sum(math.prod(size) for size in tokens.references)
        if share is not None and count <= (route.after or 0):
            start += tokens.count
            for size in tokens.references:
                grids.append(Grid(start, size, share))
                start += math.prod(size)
        length = None if route.after is None else route.before + tokens.count + route.after
        groups, plans = None, step.plans
        if plans is not None and plans.latents() is not None:
            if plans.unsettled:
                plans.drop_stale()
            plans.calls[name] += 1
            sizes = tuple(grid.size for grid in grids)
            groups = plans.groups.setdefault((name, plans.calls[name], config, sizes), {})
        options = KeyMerging(config.fit_queries, config.tile_size, config.seed)
        draw = step.draw if config.redraw else None
        leader = step.leader if config.share_guidance_plan else None
        return MergeJob(
            tuple(grids), length, route.first, options=options, draw=draw, leader=leader,
            groups=groups, **{"queries": tokens.count, **route.job},
        )  # fmt: skip


class Counts(Protocol):
    """Numbers of tokens before and after merging: of groups, a plan, or chosen tokens."""

    @property
    def tokens_in(self) -> int:
        """Return the number of tokens before merging."""

    @property
    def tokens_kept(self) -> int:
        """Return the number of tokens that were kept."""


class FitErrors:
    """Sums of a restored layer's estimated errors over calls (`ChosenTokens.left_out_error`)."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all calls."""
        self._sums: Tensor | None = None

    def add(self, errors: Tensor, deviations: Tensor) -> None:
        """Add a call's sums of squared errors and of squared deviations from the mean."""
        sums = torch.stack([errors, deviations])
        with ADDING:
            self._sums = sums if self._sums is None else sums + self._sums.to(sums.device)

    def relative(self) -> float | None:
        """Return the relative error of all calls, or None if there was none. Waits for the device.

        It is 0 if the layer's outputs were all equal.
        """
        if self._sums is None:
            return None
        errors, deviations = self._sums.tolist()
        return math.sqrt(errors / deviations) if deviations else 0.0


class LayerStats:
    """Counters of one layer since the last `reset`.

    They count calls, tokens in and tokens kept. With `keep` the tokens kept are keys. `last_reason`
    is the reason why the latest call was not merged, or None if it was.

    Args:
        name: name of the layer.
        device: device of the counters of compiled regions. If None, these are not counted.
        kind: "attention", "mlp", "block", or "text" for an MLP of the text.
    """

    def __init__(
        self, name: str, device: torch.device | None = None, kind: str = "attention"
    ) -> None:
        self.name, self.kind, self.device = name, kind, device
        self._compiled = Sums(3, device)  # of calls in compiled regions
        self.errors = FitErrors()
        self.reset()

    def reset(self, device: torch.device | None = None) -> None:
        """Set all counters to zero. Compiled regions count on `device`."""
        self.calls = self.tokens_in = self.tokens_kept = 0  # of all other calls
        self._compiled.reset(device)
        self.errors.reset()
        self.size: tuple[int, ...] | None = None
        self.last_reason: str | None = NEVER_CALLED
        self.note = ""

    def skipped(self, reason: str, tokens: int) -> None:
        """Count a call that was not merged because of `reason`."""
        self.last_reason = reason
        self._add(tokens, tokens)

    def merged(self, plans: Sequence[Counts], size: tuple[int, ...], note: str = "") -> None:
        """Count a call that merged.

        Args:
            plans: plans of the generated image's tokens, then those of references.
            size: size of the image in tokens.
            note: text for the report about a fallback.
        """
        self.last_reason = None
        self.size = size if len(size) > 1 else None
        self.note = note
        kept = sum(plan.tokens_kept for plan in plans)
        self._add(sum(plan.tokens_in for plan in plans), kept)

    def computed_as_one(self, tokens: int, repeats: int) -> None:
        """Count a call with `tokens` tokens, of which `repeats` are equal and computed as one."""
        self.last_reason, self.note = None, f"{repeats} equal tokens computed as one"
        self._add(tokens, tokens - repeats + 1)

    def totals(self) -> tuple[int, int, int]:
        """Return (calls, sum of tokens in, sum of tokens kept)."""
        calls, tokens_in, tokens_kept = self._compiled.totals()
        return self.calls + calls, self.tokens_in + tokens_in, self.tokens_kept + tokens_kept

    def _add(self, tokens_in: int, tokens_kept: int) -> None:
        """Count a call."""
        if torch.compiler.is_compiling():
            self._compiled.add(1, tokens_in, tokens_kept)
            return
        with ADDING:
            self.calls += 1
            self.tokens_in += tokens_in
            self.tokens_kept += tokens_kept


class MergedForward:
    """Replace the `forward` of a module that has a MergeHook, in copies of the module too.

    diffusers' registry binds a function to each module. After a deepcopy, such a function would run
    the original's weights, and `torch.compile` would compile each repeated block separately
    (`compile_repeated_blocks`). A method is the same function for all modules.

    Args:
        module: the module.
        hook: merges the calls. If None, the hook was removed, but a reference to this method
            remains.
        inner: the module's own forward.

    Attributes:
        bare: True if that was the forward of the module's class, which may have been replaced since
            (by tomesd's patch).
    """

    bare = False

    def __init__(self, module: nn.Module, hook: Any, inner: Callable[..., Any]) -> None:
        self.module, self.inner = module, inner
        self.hook = hook

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Watch kernels, since a model that was saved whole merges without `apply_mame`."""
        vars(self).update(values)
        watch_kernels()

    @outside_old_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, merged if the layer can merge the call."""
        hook: MergeHook | None = self.hook
        if hook is None:
            return self.inner(*args, **kwargs)
        shared, stats = hook.shared, hook.stats
        setting = hook.setting
        if not setting.active:
            return self.inner(*args, **kwargs)
        call = hook.layer.call(self.module, self.inner, args, kwargs)
        config: MaMeConfig | None = setting.config
        if setting.of_layer:  # a name would be a constant of every compiled block
            config = setting.of_layer.get(stats.name, config)
        if config is None:
            stats.skipped(LEFT, hook.layer.count(call, hook.layout()))
            return call.run()
        rows = running_rows() if shared.restores_blocks else None
        layout, kernel = hook.layout(), shared.kernel
        if hook.layer.repeats_text and config.equal_text and config.tau is None:
            shortened = hook.layer.with_one_of_equal(call, layout, kernel)
            if shortened is not None:
                call, repeats = shortened
                image, text = merged_call(
                    hook.layer, call, layout, config, stats, hook.step, kernel, rows, repeats
                )
                return image, all_text(text, repeats)
        return merged_call(hook.layer, call, layout, config, stats, hook.step, kernel, rows)


class LayerHook:
    """Base of the hooks around a layer: settings, counters, the tokens' layout and the step.

    Args:
        shared: state that the hooks of a handle share.
        stats: counters of the layer.
        layouts: layout of the tokens in each thread's latest call of the model. If None, it is
            unknown.
        number: number of the layer in its model, from 0. Neighbours take different draws in one
            step, so that their errors do not add up.
    """

    name: str
    replacement = MergedForward
    entry: Any = None  # replaces the module's forward, a method of `replacement`

    def __init__(
        self, shared: HandleState, stats: LayerStats, layouts: PerThread | None, number: int = 0
    ) -> None:
        self.place = number % DRAWS
        # A 0-dimensional tensor works on any device, and is no constant of a compiled graph.
        self.number = torch.tensor(number)
        self.shared = shared
        self.stats = stats
        self.layouts = layouts

    def put(self, module: nn.Module, inner: Callable[..., Any]) -> Any:
        """Return the function that replaces `inner`, the own forward of a module."""
        self.entry = self.replacement(module, self, inner).forward
        return self.entry

    @property
    def setting(self) -> ResolvedConfig:
        """Return the setting in force."""
        own = self.shared.own  # inlined from `HandleState.now` and `Nested`, to save calls
        mine = getattr(own.mine, "value", None) if torch.compiler.is_compiling() else own.var.get()
        setting: ResolvedConfig = mine[-1][0] if mine else self.shared.setting
        return setting

    def layout(self) -> Tokens | None:
        """Return the layout of the tokens in this thread's latest call of the model.

        It is None if the layout is unknown.
        """
        layouts = self.layouts
        return None if layouts is None else getattr(layouts.mine, "value", layouts.latest)

    def step(self) -> Step:
        """Return the step of this thread's latest call of the model.

        The step is the same with gradients and without them, except that calls with gradients share
        no plans. If the model checkpoints gradients there is no step, so that a recomputed block
        merges as before, whatever has run in between (`StepHook`).

        Raises:
            RuntimeError: a block is recomputed after a call at another timestep.
        """
        shared, plans = self.shared, None
        latest: Step | LazyStep | None = getattr(shared.step.mine, "value", None)
        step: Step | LazyStep | None = shared.step.latest if latest is None else latest
        if isinstance(step, LazyStep):
            plans = None if latest is None else step.plans
            step = step.made or step.step()
        if step is None or step is NO_STEP:
            return NO_STEP
        learns = torch.is_grad_enabled()
        if torch.compiler.is_compiling():  # an int would be a constant of the graph
            draw = None if step.draw is None else (step.draw + self.number) % DRAWS
            return Step(draw, leader=step.leader)  # graphs can't hold plans
        draw = None if step.draws is None else step.draws[self.place : self.place + 1]
        if learns and torch._C._current_graph_task_id() >= 0:  # in a backward pass
            shared.learning.again()
        return Step(draw, leader=step.leader, plans=None if learns else plans)


class MergeHook(LayerHook):
    """Merge in one layer, and in deepcopies of its module.

    `layer` is the adapter of the kind of module. All other arguments are those of `LayerHook`.
    """

    name = "mame"

    def __init__(
        self,
        shared: HandleState,
        stats: LayerStats,
        layer: AttentionAdapter,
        layouts: PerThread | None,
        number: int = 0,
    ) -> None:
        super().__init__(shared, stats, layouts, number)
        self.layer = layer


def merged_call(
    layer: AttentionAdapter,
    call: LayerCall,
    layout: Tokens | None,
    config: MaMeConfig,
    stats: LayerStats,
    step: Callable[[], Step] = lambda: NO_STEP,
    kernel: KernelAdapter | None = None,
    rows: Rows | None = None,
    repeats: int = 1,
) -> Any:
    """Compute a call, merged if the layer can merge it, and count it.

    Args:
        layer: adapter of the module.
        call: the call.
        layout: layout of the tokens, as for `AttentionAdapter.route`.
        config: the settings.
        stats: counters of the layer.
        step: returns the step. It is called only if keys merge.
        kernel: computes attention over merged keys instead of the model's own kernel.
        rows: the rows that the block around the layer computes. If None, all rows.
        repeats: how often the last text token counts in attention.

    Returns:
        The module's output.

    Raises:
        RuntimeError: attention over a text with `repeats` could not be intercepted.
    """
    if rows is not None and needs_all_rows(call.module):
        with RowsMode(None):
            return merged_call(layer, call, layout, config, stats, step, kernel, None, repeats)
    route = layer.route(call, layout, config)
    if isinstance(route, MergeTokens):
        plan = layer.plan(route)
        stats.merged((plan,), route.tokens.size)
        return layer.with_merged_tokens(route, plan)
    keeps_all = config.keep == 1 and config.reference_share is None
    merges = isinstance(route, MergeKeys) and not keeps_all
    if not merges:
        why = route.reason if isinstance(route, Skip) else KEEPS_ALL
        stats.skipped(why, layer.count(call, layout))
        if rows is None and repeats == 1:
            return call.run()
        if config.tau is None:
            route = layer.route(call, layout, EVERY)
    if not isinstance(route, MergeKeys):
        return call.run()
    size = route.tokens.size
    job = layer.job(route, stats.name, step() if merges else NO_STEP)
    job.merges, job.repeats = merges, repeats
    job.kernel = kernel if merges or rows is not None else None
    job.rows = None if rows is None else rows.chosen.at
    with SDPAInterceptor(job):
        output = call.run() if route.run is None else route.run()
    if repeats > 1 and not job.counted:
        raise RuntimeError(UNSEEN.format(call.kind) + ": give equal_text=False")
    if not merges:  # only rows or repeats
        return output
    if job.merged is None:
        stats.skipped(job.left or UNSEEN.format(call.kind), route.tokens.count)
    else:
        count = len(job.grids) - 1
        others = f"keys of {counted(count, 'reference image')} too" if count else ""
        note = "; ".join(filter(None, (route.note, job.note, others)))
        stats.merged(job.merged.groups, size, note)
    return output
