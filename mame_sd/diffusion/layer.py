"""The way of a call through a merging layer: decide, merge, call, restore.

`merged_call` is that way for every layer and for both ways into diffusers (hooks and the
processor), so they give the same numbers. A call is looked at once, by `AttentionAdapter.route`: it
gives the `Route` that all else takes, or says why the call is left alone. With `keep` the keys
merge within the call, where the processor calls attention (`interception.py`). With `tau` whole
tokens merge before it and are restored after it (`mame_sd.core.paper`). What differs between layers
is said by a `AttentionAdapter`: a UNet's self-attention (`families/unet.py`) or a transformer's
(`families/sequence.py`).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.attention import Grid, KeyMerging, OwnKernel
from mame_sd.core.paper import Plan, plan_tokens
from mame_sd.diffusion.interception import MergeJob, SDPAInterceptor
from mame_sd.diffusion.plans import Plans
from mame_sd.report import LayerStats

NO_SIZE = "height and width unknown: keys are compared along the sequence; give size=(h, w)"
UNSEEN = "{} calls no attention over the layer's tokens that can be intercepted"
Call = Mapping[str, Any]  # the arguments of a forward, by name


@dataclass(frozen=True)
class Tokens:
    """How the tokens of one call lie.

    Attributes:
        size: (h, w) of an image's tokens, or (t, h, w) of a video's, in row-major order; (n,) where
            rows and columns are unknown.
        before: tokens of something else, such as text, that stand before them in layers where both
            share a sequence; None: any number, another in each layer, and `after` behind them.
        after: the same, behind them (in every layer, such as a reference image's); None: any
            number, another in each layer.
        unknown: why they can't be told in this call, in which then nothing merges.
        references: the sizes of reference images that stand right behind them, in their order; the
            first of what `after` counts.
        count: how many tokens the image or video has.
    """

    size: tuple[int, ...]
    before: int | None = 0
    after: int | None = 0
    unknown: str = ""
    references: tuple[tuple[int, ...], ...] = ()
    count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", math.prod(self.size))

    def start(self, length: int) -> int | None:
        """Where they begin in a sequence of `length`; None if they can't be in it."""
        if length == self.count:
            return 0
        if self.before is None:
            start = length - self.count - (self.after or 0)
            return start if start >= 0 else None
        if self.after is None:
            return self.before if length >= self.before + self.count else None
        if length == self.count + self.after:
            return 0
        return self.before if length == self.before + self.count + self.after else None


class LayerCall(NamedTuple):
    """One call of a module.

    Attributes:
        module: the module.
        forward: what computes it.
        arguments: by name.
        by_place: names of the arguments that came without one.
        rest: further arguments that have no name.
        processor: the attention processor in it.
        kind: what attends, by name: the processor, or the module where it has none.
    """

    module: Any
    forward: Callable[..., Any]
    arguments: Mapping[str, Any]
    by_place: tuple[str, ...] = ()
    rest: tuple[Any, ...] = ()
    processor: Any = None
    kind: str = ""

    def run(self, **changes: Any) -> Any:
        """The module's own output, with `changes` of the arguments, each passed on as it came."""
        given = {**self.arguments, **changes}
        args = [given.pop(name) for name in self.by_place]
        return self.forward(*args, *self.rest, **given)


class Step(NamedTuple):
    """What the call of the model around a layer says of merging in it.

    Attributes:
        draw: LongTensor [1], which of the drawn partitions it takes.
        draws: those of DRAWS layers that follow one another, [DRAWS]; None in a compiled graph.
        leader: of each sample of the batch the one whose tokens decide what merges
            (`mame_sd.core.pairs`). None: each sample decides by itself.
        plans: what merged in an earlier call of the same input, and merges again in this one; None:
            this call stands alone.
    """

    draw: Tensor | None = None
    draws: Tensor | None = None
    leader: Tensor | None = None
    plans: Plans | None = None


NO_STEP = Step()  # of layers around which nothing tells of one


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
        parameters = (
            []
            if module is None
            else list(inspect.signature(type(module).forward).parameters.values())[1:]
        )
        self._names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

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

        Args:
            call: the call.
            known: how the tokens lie, from the model around the layer; None where nothing says it.
            config: the settings.
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
        recall = None
        if step.plans is not None:
            shape = sum((grid.size for grid in grids), ())
            recall = partial(step.plans.groups, name, config, shape)
        how = KeyMerging(config.fit_queries, config.tile_size, config.seed)
        draw = step.draw if config.redraw else None
        leader = step.leader if config.share_guidance_plan else None
        return MergeJob(
            tuple(grids), length, route.first, how=how, draw=draw, leader=leader, recall=recall,
            **{"queries": tokens.count, **route.job},
        )  # fmt: skip


def merged_call(
    layer: AttentionAdapter,
    call: LayerCall,
    known: Tokens | None,
    config: MaMeConfig,
    stats: LayerStats,
    step: Callable[[], Step] = lambda: NO_STEP,
    kernel: OwnKernel | None = None,
) -> Any:
    """The output of `call`, merged where that is sound, and counted.

    Args:
        layer: the kind of module.
        call: the call.
        known: how the tokens lie, from the model around the layer; None where nothing says it.
        config: the settings.
        stats: counters of this layer.
        step: gives what the model around says of this step; asked where keys merge.
        kernel: computes attention over merged keys instead of the model's own.
    """
    route = layer.route(call, known, config)
    if isinstance(route, str):
        stats.skipped(route, layer.count(call, known))
        return call.run()
    size = route.tokens.size
    if config.tau is not None:
        assert route.merge_tokens is not None
        plan = layer.plan(route)
        stats.merged(plan, size, route.note)
        return route.merge_tokens(route, plan)
    job = layer.job(route, stats.name, step())
    job.kernel = kernel
    with SDPAInterceptor(job):
        output = call.run() if route.run is None else route.run()
    if job.merged is None:
        stats.skipped(UNSEEN.format(call.kind), route.tokens.count)
    else:
        note = "; ".join(filter(None, (route.note, job.note)))
        stats.merged(job.merged.groups[0], size, note, of=job.merged.groups)
    return output


def compared(attn: Any, hidden_states: Tensor, kind: str) -> Tensor:
    """What similarity compares of tokens [B, L, C]: them ("x"), their keys ("k"), or keys averaged
    over heads ("k-mean").
    """
    if kind == "x":
        return hidden_states
    keys: Tensor = attn.to_k(hidden_states)
    return keys if kind == "k" else keys.unflatten(-1, (-1, attn.inner_dim // attn.heads)).mean(-2)


def skips_scores(attn: Any) -> bool:
    """Whether diffusers' layer skip puts values instead of attention, which it does where there are
    as many as queries.
    """
    registry = getattr(attn, "_diffusers_hook", None)
    return registry is not None and any(
        getattr(h, "skip_attention_scores", False) for h in registry.hooks.values()
    )
