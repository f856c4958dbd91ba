"""The way of a call through a merging layer: guard, plan, merge, call, restore.

`merged_call` is that way for every layer and for both ways into diffusers (hooks and the processor), so they give the same
numbers. What differs between layers is said by a `Layer`: a UNet's self-attention (`families/unet.py`), a transformer's
(`families/sequence.py`), feed-forward networks and cross-attention (`families/parts.py`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import plan_merge
from mame_sd.core.pairs import leaders_in
from mame_sd.core.partition import GRIDS
from mame_sd.core.plan import Plan
from mame_sd.core.row_plan import RowPlan
from mame_sd.core.triton_plan import kernel_note
from mame_sd.diffusion.tokens import Tokens
from mame_sd.report import LayerStats

if TYPE_CHECKING:  # it needs diffusers, which ComfyUI's node does without
    from mame_sd.diffusion.calls import Plans

WORTHWHILE = 0.85  # share of tokens kept above which merging saves less than it costs; with tau it is known only now
NOTHING_TO_WIN = f"tau keeps more than {WORTHWHILE:.0%} of the tokens: left whole"
NO_SIZE = "height and width unknown: merged with partition 'alternating' and without tiles; give size=(h, w)"
NO_DETAIL = "height and width unknown: restored as copies, without detail; give size=(h, w)"


@dataclass(frozen=True)
class LayerCall:
    """One call of a module: its arguments as they came and their names, what computes it, the attention processor in it.

    Positional arguments beyond `names` have none and are passed on as they are.
    """

    module: Any
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...] = ()
    processor: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {**dict(zip(self.names, self.args, strict=False)), **self.kwargs}

    @property
    def kind(self) -> str:
        """What attends, by name: the processor, or the module where it has none."""
        return type(self.module if self.processor is None else self.processor).__name__

    def run(self, **changes: Any) -> Any:
        """The module's own output, with `changes` of the arguments, each passed on as it came."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changes.items():
            if name in self.names[: len(args)]:
                args[self.names.index(name)] = value
            else:
                kwargs[name] = value
        return self.forward(*args, **kwargs)


class Step(NamedTuple):
    """What the call of the model around a layer says of merging in it.

    Attributes:
        draw: which of the drawn partitions it takes, see `plan_merge`.
        leader: of each sample of the batch the one whose tokens decide what merges (`mame_sd.core.pairs`); None: each its own.
        plans: what merged in an earlier call of the same input, and merges again in this one; None: this call stands alone.
    """

    draw: Tensor | None = None
    leader: Tensor | None = None
    plans: Plans | None = None


class Unmerged(NamedTuple):
    """An output that was computed without merging after all, and why."""

    output: Any
    reason: str


NO_STEP = Step()


class Layer(ABC):
    """What one kind of module's calls look like to merging.

    Args:
        module: a module of that kind, whose forward names the arguments; the calls may come from copies of it.
    """

    hidden = "hidden_states"  # the argument that holds the tokens [B, L, C]

    def __init__(self, module: nn.Module | None = None) -> None:
        parameters = [] if module is None else list(inspect.signature(type(module).forward).parameters.values())[1:]
        self._names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LayerCall:
        """A call of `module`, whose own forward is `forward`."""
        return LayerCall(module, forward, args, kwargs, self._names, getattr(module, "processor", None))

    @abstractmethod
    def tokens(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Tokens | str:
        """How the tokens of this call lie, or why it passes through untouched. `known` is what the model around says."""

    @abstractmethod
    def merged(self, call: LayerCall, tokens: Tokens, plan: Plan, config: MaMeConfig) -> Any:
        """The module's output, computed on merged tokens and whole again; `Unmerged` where that could not be done."""

    def feature(self, call: LayerCall, tokens: Tokens, config: MaMeConfig) -> Tensor:
        """What similarity compares, [B, n, d] of the n tokens that may merge, in the order of their plane."""
        hidden: Tensor = call.arguments[self.hidden]
        return hidden

    def plan(self, call: LayerCall, tokens: Tokens, config: MaMeConfig, step: Step) -> Plan:
        """What merges in this call."""
        feature = self.feature(call, tokens, config)
        return plan_merge(feature, config, tokens.plane, draw=step.draw, leader=leaders_in(step.leader, feature))

    def detailed(self, plan: Plan, call: LayerCall, tokens: Tokens, config: MaMeConfig) -> Plan:
        """A plan of an earlier call, or one that kept no inputs, as it restores the tokens of this call."""
        if not isinstance(plan, RowPlan) or tokens.plane is None or not config.detail:
            return plan
        return plan.without_detail().with_detail(self.feature(call, tokens, config), tokens.plane)

    def restores(self, call: LayerCall, config: MaMeConfig) -> bool:
        """Whether whole tokens merge in this call, whose plan then keeps their inputs."""
        return config.merge == "qkv"

    def count(self, call: LayerCall, known: Tokens | None) -> int:
        """Tokens of a call that is left alone."""
        hidden = call.arguments.get(self.hidden)
        return int(hidden.shape[1]) if isinstance(hidden, Tensor) and hidden.dim() > 1 else 0

    def note(self, call: LayerCall, config: MaMeConfig) -> str:
        """What a report says where another way than the settings' was taken."""
        return ""

    def fitted(self, config: MaMeConfig, tokens: Tokens) -> tuple[MaMeConfig, str]:
        """The settings that hold for these tokens, and what a report says where they are not the given ones."""
        without = config.without_plane
        if tokens.plane is not None or without is config:
            return config, ""
        notes = [NO_SIZE] if config.partition in GRIDS or config.tiles else []
        notes += [NO_DETAIL] if config.detail and config.merge == "qkv" else []
        notes += [f"kernel {config.kernel!r} needs tiles: not run"] if config.kernel is not None else []
        return without, ". ".join(notes)


def merged_call(
    layer: Layer,
    call: LayerCall,
    known: Tokens | None,
    config: MaMeConfig,
    stats: LayerStats,
    step: Step = NO_STEP,
) -> Any:
    """The output of `call`, merged where that is sound, and counted.

    Args:
        layer: the kind of module.
        call: the call.
        known: how the tokens lie, from the model around the layer; None where nothing says it.
        config: the settings.
        stats: counters of this layer.
        step: what the model around says of this step.
    """
    tokens = layer.tokens(call, known, config)
    if isinstance(tokens, str):
        stats.skipped(tokens, layer.count(call, known))
        return call.run()
    config, fallback = layer.fitted(config, tokens)
    plan = _plan(layer, call, tokens, config, stats.name, step)
    if nothing_to_win(config, plan):
        stats.whole(plan, tokens.size if tokens.plane else None, fallback, NOTHING_TO_WIN)
        return call.run()
    output = layer.merged(call, tokens, plan, config)
    if isinstance(output, Unmerged):
        stats.skipped(output.reason, tokens.count)
        return output.output
    note = layer.note(call, config)
    stats.merged(plan, tokens.size if tokens.plane else None, fallback, note, kernel_note(config, plan))
    return output


def _plan(layer: Layer, call: LayerCall, tokens: Tokens, config: MaMeConfig, name: str, step: Step) -> Plan:
    """What merges in this call: what merged in an earlier one of the same input, if there was one."""
    made: list[Plan] = []

    def make() -> Plan:
        made.append(layer.plan(call, tokens, config, step))
        return made[0]

    if step.plans is None:
        plan = make()
    else:
        plan = step.plans.plan(name, config, (call.arguments[layer.hidden].shape[0], *tokens.size), make)
    if layer.restores(call, config):
        return plan if made else layer.detailed(plan, call, tokens, config)
    return plan.with_detail(None, (0, 0)) if isinstance(plan, RowPlan) else plan


def nothing_to_win(config: MaMeConfig, plan: Plan) -> bool:
    """Whether merging keys and values by this plan saves less than it costs."""
    if config.merge != "kv" or config.tau is None or torch.compiler.is_compiling():
        return False
    return plan.tokens_kept > WORTHWHILE * plan.tokens_in


def compared(attn: Any, hidden_states: Tensor, kind: str) -> Tensor:
    """What similarity compares of tokens [B, L, C]: them ("x"), their keys ("k"), or keys averaged over heads ("k-mean")."""
    if kind == "x":
        return hidden_states
    keys: Tensor = attn.to_k(hidden_states)
    return keys if kind == "k" else keys.unflatten(-1, (-1, attn.inner_dim // attn.heads)).mean(-2)
