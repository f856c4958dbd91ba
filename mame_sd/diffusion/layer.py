"""The way of a call through a merging layer: decide, plan, merge, call, restore.

`merged_call` is that way for every layer and for both ways into diffusers (hooks and the
processor), so they give the same numbers. A call is looked at once, by `Layer.route`: it gives the
`Route` that all else takes, or says why the call is left alone. What differs between layers is said
by a `Layer`: a UNet's self-attention (`families/unet.py`), a transformer's
(`families/sequence.py`), feed-forward networks and cross-attention (`families/parts.py`).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.detail import Detail
from mame_sd.core.merge import plan_merge
from mame_sd.core.partition import GRIDS
from mame_sd.core.plan import Plan
from mame_sd.diffusion.worth import LEFT_UNMERGED, no_gain
from mame_sd.report import LayerStats

# share of tokens kept above which merging saves less than it costs; with tau it is known only now
WORTHWHILE = 0.85
NOTHING_TO_WIN = f"tau keeps more than {WORTHWHILE:.0%} of the tokens: left whole"
NO_SIZE = (
    "height and width unknown: merged with partition 'alternating' and without tiles; give"
    " size=(h, w)"
)
NO_DETAIL = "height and width unknown: restored as copies, without detail; give size=(h, w)"


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
        plane: the (rows, columns) on which tokens are compared; None where they are unknown. A
            video's plane is (h * t, w): the rows of all frames interleaved. A tile of the plane
            thus spans neighbours in time as well as in space.
    """

    size: tuple[int, ...]
    before: int | None = 0
    after: int | None = 0
    unknown: str = ""
    references: tuple[tuple[int, ...], ...] = ()
    count: int = field(init=False, compare=False, repr=False)
    plane: tuple[int, int] | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        count = math.prod(self.size)
        object.__setattr__(self, "count", count)
        object.__setattr__(
            self, "plane", None if len(self.size) == 1 else (count // self.size[-1], self.size[-1])
        )

    def start(self, length: int) -> int | None:
        """Where they begin in a sequence of `length`; None if they can't be in it."""
        if self.before is None:
            start = length - self.count - (self.after or 0)
            return 0 if length == self.count else start if start >= 0 else None
        if self.after is None:
            return (
                self.before
                if length >= self.before + self.count
                else 0
                if length == self.count
                else None
            )
        if length in (self.count, self.count + self.after):
            return 0
        return self.before if length == self.before + self.count + self.after else None

    def to_plane(self, image: Tensor) -> Tensor:
        """These tokens [B, n, C] in the plane's order."""
        return (
            image.unflatten(1, self.size).transpose(1, 2).flatten(1, 3)
            if len(self.size) == 3
            else image
        )

    def from_plane(self, image: Tensor) -> Tensor:
        """Tokens [B, n, C] in the plane's order in their own again."""
        if len(self.size) < 3:
            return image
        t, h, w = self.size
        return image.unflatten(1, (h, t, w)).transpose(1, 2).flatten(1, 3)

    def places(self, on_plane: Tensor) -> Tensor:
        """Where tokens at these places of the plane are among all of them, in their own order."""
        if len(self.size) < 3:
            return on_plane
        t, h, w = self.size
        row, column = on_plane // w, on_plane % w
        return (row % t * h + row // t) * w + column


class LayerCall(NamedTuple):
    """One call of a module.

    Attributes:
        module: the module.
        forward: what computes it.
        given: its arguments by name.
        by_place: names of the arguments that came without one.
        rest: further arguments that have no name.
        processor: the attention processor in it.
        kind: what attends, by name: the processor, or the module where it has none.
    """

    module: Any
    forward: Callable[..., Any]
    given: Mapping[str, Any]
    by_place: tuple[str, ...] = ()
    rest: tuple[Any, ...] = ()
    processor: Any = None
    kind: str = ""

    def run(self, **changes: Any) -> Any:
        """The module's own output, with `changes` of the arguments, each passed on as it came."""
        given = {**self.given, **changes}
        args = [given.pop(name) for name in self.by_place]
        return self.forward(*args, *self.rest, **given)


class KeptPlans(Protocol):
    """Plans of an earlier call of the same input (`mame_sd.diffusion.hooks.Plans`)."""

    def plan(
        self, layer: str, config: MaMeConfig, shape: tuple[int, ...], make: Callable[[], Plan]
    ) -> Plan:
        """What merges in the next call of a layer."""


class Step(NamedTuple):
    """What the call of the model around a layer says of merging in it.

    Attributes:
        draw: which of the drawn partitions it takes, see `plan_merge`.
        draws: those of DRAWS layers that follow one another, [DRAWS]; None in a compiled graph.
        leader: of each sample of the batch the one whose tokens decide what merges
            (`mame_sd.core.pairs`). None: each sample decides by itself.
        plans: what merged in an earlier call of the same input, and merges again in this one; None:
            this call stands alone.
    """

    draw: Tensor | None = None
    draws: Tensor | None = None
    leader: Tensor | None = None
    plans: KeptPlans | None = None


NO_STEP = Step()


class Reference(NamedTuple):
    """One reference image of a call: how its tokens lie, and what similarity compares of them."""

    tokens: Tokens
    feature: Tensor


@dataclass(frozen=True)
class Route:
    """How a call merges: what is decided before anything is computed.

    Attributes:
        call: the call.
        form: computes its output by a plan: what merges (keys and values, or whole tokens) and how.
        config: the settings that hold for these tokens.
        tokens: how they lie.
        feature: what similarity compares, [B, n, d] of the n tokens that may merge, in the order of
            their plane.
        note: what a report says where another way than the settings' is taken.
        references: reference images behind the tokens that merge too.
        first: where the tokens begin in the sequence that holds them.
        before, after: tokens beside them that attention sees too, before and after them.
    """

    call: LayerCall
    form: Callable[[Route, Plan], Output | None]
    config: MaMeConfig
    tokens: Tokens
    feature: Tensor
    note: str = ""
    references: tuple[Reference, ...] = ()
    first: int = 0
    before: int = 0
    after: int = 0

    def detail(self, merged: Tensor) -> Detail | None:
        """By what restored tokens of one group differ, of which these are the merged ones; None:
        they are copies.
        """
        if not self.config.detail or self.tokens.plane is None:
            return None
        return Detail(
            self.feature, self.tokens.plane, merged if self.config.feature == "x" else None
        )


class Output(NamedTuple):
    """What a form computed, and a note for the report where it is not all that the settings ask
    for.
    """

    value: Any
    note: str = ""


class Layer(ABC):
    """What one kind of module's calls look like to merging.

    Args:
        module: a module of that kind, whose forward names the arguments; the calls may come from
            copies of it.
    """

    hidden = "hidden_states"  # the argument that holds the tokens [B, L, C]
    early: bool | None = (
        # whether keys that merge alone are made of merged tokens; None: its cost isn't reckoned
        None
    )

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
        hidden = call.given.get(self.hidden)
        return int(hidden.shape[1]) if isinstance(hidden, Tensor) and hidden.dim() > 1 else 0

    def plan(self, route: Route, step: Step) -> Plan:
        """What merges."""
        plane, leader = route.tokens.plane, step.leader
        plan = plan_merge(route.feature, route.config, plane, draw=step.draw, leader=leader)
        return self.joined(plan, route, step) if route.references else plan

    def joined(self, plan: Plan, route: Route, step: Step) -> Plan:
        """The plan of an image and of the reference images that merge too."""
        raise NotImplementedError


def merged_call(
    layer: Layer,
    call: LayerCall,
    known: Tokens | None,
    config: MaMeConfig,
    stats: LayerStats,
    step: Step = NO_STEP,
    may_leave: bool = False,
) -> Any:
    """The output of `call`, merged where that is sound, and counted.

    Args:
        layer: the kind of module.
        call: the call.
        known: how the tokens lie, from the model around the layer; None where nothing says it.
        config: the settings.
        stats: counters of this layer.
        step: what the model around says of this step.
        may_leave: leave the layer whole where merging would win nothing on its card (`worth.py`).
    """
    route = layer.route(call, known, config)
    if isinstance(route, str):
        stats.skipped(route, layer.count(call, known))
        return call.run()
    tokens, feature, vain = route.tokens, route.feature, ""
    if feature.is_cuda and layer.early is not None:
        vain = no_gain(call.module, route.config, feature, route.before + route.after, layer.early)
        if vain and may_leave:
            stats.left_unmerged(tokens.count, tokens.size, LEFT_UNMERGED.format(vain))
            return call.run()
    if step.plans is None:
        plan = layer.plan(route, step)
    else:  # what merged in an earlier call of the same input, if there was one
        shape = feature.shape[0], *tokens.size, *sum((r.tokens.size for r in route.references), ())
        plan = step.plans.plan(stats.name, route.config, shape, partial(layer.plan, route, step))
    size = None if tokens.plane is None else tokens.size
    if route.config.tau is not None and nothing_to_win(route.config, plan):
        stats.kept_all(plan, size, route.note, NOTHING_TO_WIN)
        return call.run()
    output = route.form(route, plan)
    if output is None:  # the call is not what it was taken for, which the layer knows now
        return merged_call(layer, call, known, config, stats, step, may_leave)
    stats.merged(plan, size, route.note, output.note, vain)
    return output.value


def nothing_to_win(config: MaMeConfig, plan: Plan) -> bool:
    """Whether merging keys and values by this plan saves less than it costs."""
    if config.merge != "kv" or config.tau is None or torch.compiler.is_compiling():
        return False
    return plan.tokens_kept > WORTHWHILE * plan.tokens_in


def settings_for(config: MaMeConfig, tokens: Tokens) -> tuple[MaMeConfig, str]:
    """The settings that hold for these tokens, and what a report says where they are not the given
    ones.
    """
    without = config.without_plane
    if tokens.plane is not None or without is config:
        return config, ""
    notes = [NO_SIZE] if config.partition in GRIDS or config.tiles else []
    notes += [NO_DETAIL] if config.detail and config.merge == "qkv" else []
    return without, ". ".join(notes)


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
