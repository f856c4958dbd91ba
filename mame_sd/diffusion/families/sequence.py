"""Merging around one attention call of a transformer family: the image's tokens merge, what stands beside them follows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import plan_merge
from mame_sd.core.plan import Plan
from mame_sd.core.triton_plan import kernel_note
from mame_sd.diffusion.attention import feature_of
from mame_sd.diffusion.families.family import Call, Family, Tokens
from mame_sd.report import LayerStats

WHOLE = "queries merge too: this attention takes no keys of its own"
PARTS = (
    "{}, which cuts the batch into parts; samples that keep their own tokens run alone (tau lets them keep the same)"
)


class FamilyLayer:
    """One attention module of a family: binds its calls' arguments to names, and merges them.

    Args:
        module: the attention module.
        family: what its calls look like.
    """

    def __init__(self, module: nn.Module, family: Family) -> None:
        self.family = family
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        self._names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, by name."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def skip_reason(self, call: Call, tokens: Tokens | None, config: MaMeConfig) -> str | None:
        """Why this call passes through untouched; None if it may merge."""
        hidden = call.get(self.family.inputs[0])
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return "input is no tokens [B, L, C]"
        if tokens is None:
            return "height and width unknown (under torch.compile: compile the blocks, not the whole model)"
        beside = call.get("encoder_hidden_states") is not None and "encoder_hidden_states" not in self.family.inputs
        if beside and not self.family.cross:
            return "cross-attention"
        first = start_of(hidden.shape[1], tokens)
        if first is None:
            return f"{hidden.shape[1]} tokens are not those of {' x '.join(map(str, tokens.size))}"
        if tokens.count < config.min_tokens:
            return f"fewer than min_tokens={config.min_tokens}"
        if call.get("attention_mask") is not None and not self.family.mask:
            return "attention mask"
        if config.merge == "kv" and "merge" in config.given:
            return f"merge='kv' is unknown to {self.family.name}: {WHOLE}; leave merge out or give merge='qkv'"
        return None

    def merged(
        self,
        module: Any,
        call: dict[str, Any],
        tokens: Tokens,
        config: MaMeConfig,
        stats: LayerStats,
        forward: Callable[..., Any],
        draw: Tensor | None = None,
    ) -> Any:
        """The attention's output on merged image tokens, restored; `skip_reason` has returned None for this call."""
        hidden: Tensor = call[self.family.inputs[0]]
        first = start_of(hidden.shape[1], tokens) or 0
        order = _Order(tokens, first, hidden)
        plan = plan_merge(feature_of(module, order.image(hidden), config.feature), config, order.plane, draw=draw)
        kept = order.positions(plan)
        if plan.tokens_kept == plan.positions.M:  # destinations alone: the same ones in every sample
            kept = kept.reshape(-1, plan.tokens_kept)[0]
        alone = self.family.select is not None and kept.dim() == 2 and kept.shape[0] > 1
        processor = type(getattr(module, "processor", None)).__name__
        if alone and processor.startswith("PAG"):
            stats.skipped(PARTS.format(processor), tokens.count)
            return forward(**call)
        stats.merged(plan, tokens.size, WHOLE if config.merge == "kv" else "", kernel_note(config, plan))
        done: dict[int, Tensor] = {}
        inner = dict(call)
        for name in self.family.inputs:
            value = call[name]
            if id(value) not in done:
                done[id(value)] = order.put(value, plan.merge(order.image(value)))
            inner[name] = done[id(value)]
        if not alone:
            if self.family.select is not None:
                inner.update(self.family.select(call, order.rows(kept.reshape(-1))))
            return self._restored(forward(**inner), order, plan)
        outputs = [forward(**self._sample(inner, call, order, kept, i)) for i in range(kept.shape[0])]
        return self._restored(_joined(outputs), order, plan)

    def _sample(self, inner: dict[str, Any], call: Call, order: _Order, kept: Tensor, i: int) -> dict[str, Any]:
        """The arguments of sample `i` alone: rotary positions are shared by a batch, merged positions are not."""
        assert self.family.select is not None
        one = {**inner, **self.family.select(call, order.rows(kept[i]))}
        return {name: _of_sample(value, kept.shape[0], i) for name, value in one.items()}

    def _restored(self, output: Any, order: _Order, plan: Plan) -> Any:
        if isinstance(output, Tensor):
            return order.restored(output, plan)
        return tuple(
            order.restored(value, plan) if i in self.family.outputs else value for i, value in enumerate(output)
        )


class _Order:
    """Where the image's tokens are in one call, and the plane they are compared on.

    An image's plane is (h, w). A video's is (h * t, w): the rows of all frames interleaved, so that a tile of the plane
    spans neighbours in time as well as in space.
    """

    def __init__(self, tokens: Tokens, first: int, hidden: Tensor) -> None:
        self.tokens = tokens
        self.first = first
        self.stop = first + tokens.count
        self.length = hidden.shape[1]
        *times, h, w = tokens.size
        self.times = times[0] if times else 1
        self.plane = (h * self.times, w)

    def image(self, t: Tensor) -> Tensor:
        """The image's tokens [B, n, C] of t [B, L, C], in the plane's order."""
        body = t[:, self.first : self.stop]
        if self.times == 1:
            return body
        return body.unflatten(1, self.tokens.size).transpose(1, 2).flatten(1, 3)

    def put(self, t: Tensor, image: Tensor) -> Tensor:
        """`image` in place of t's image tokens, those before and after them as they are."""
        if self.first == 0 and self.stop == t.shape[1]:
            return image
        return torch.cat([t[:, : self.first], image, t[:, self.stop :]], 1)

    def restored(self, y: Tensor, plan: Plan) -> Tensor:
        """All tokens from an output [B, L', ...], in the call's order."""
        flat = y.flatten(2)
        end = self.first + plan.tokens_kept
        image = plan.restore(flat[:, self.first : end])
        if self.times > 1:
            _, h, w = self.tokens.size
            image = image.unflatten(1, (h, self.times, w)).transpose(1, 2).flatten(1, 3)
        if flat.shape[1] > plan.tokens_kept:
            image = torch.cat([flat[:, : self.first], image, flat[:, end:]], 1)
        return image.unflatten(2, y.shape[2:])

    def positions(self, plan: Plan) -> Tensor:
        """[n'] or [B, n']: where the merged tokens were among the image's."""
        kept = plan.kept
        if self.times == 1:
            return kept
        _, h, w = self.tokens.size
        row, column = kept // w, kept % w
        return (row % self.times * h + row // self.times) * w + column

    def rows(self, kept: Tensor) -> Callable[[Tensor, int], Tensor]:
        """Picks the rows of merged tokens along a dimension that counts the image's, or the whole sequence's."""
        n, tokens = self.tokens.count, self.tokens

        def pick(t: Tensor, dim: int) -> Tensor:
            length = t.shape[dim]
            start = {n: 0, n + tokens.after: 0, n + tokens.before + tokens.after: tokens.before}.get(length)
            if start is None:
                raise ValueError(
                    f"rows: expected one row for each of {n} image tokens (with {tokens.before} before and "
                    f"{tokens.after} after them), got {length} along dimension {dim} of {list(t.shape)}"
                )
            index = kept.to(t.device) + start
            every = torch.arange(length, device=t.device)
            return t.index_select(dim, torch.cat([every[:start], index, every[start + n :]]))

        return pick


def start_of(length: int, tokens: Tokens) -> int | None:
    """Where the image's tokens begin in a sequence of `length`; None if they can't be in it."""
    if length in (tokens.count, tokens.count + tokens.after):
        return 0
    if length == tokens.before + tokens.count + tokens.after:
        return tokens.before
    return None


def _of_sample(value: Any, batch: int, i: int, least: int = 2) -> Any:
    """What sample `i` has of an argument.

    Raises:
        TypeError: neither tensors nor plain values, so what is the sample's can't be told.
    """
    if isinstance(value, Tensor):
        return value[i : i + 1] if value.dim() >= least and value.shape[0] == batch else value
    if isinstance(value, (tuple, list)):  # of rotary positions: a first dimension of two counts tokens, never samples
        return type(value)(_of_sample(part, batch, i, least=3) for part in value)
    if isinstance(value, dict):
        return {name: _of_sample(part, batch, i, least) for name, part in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"expected tensors, numbers, or tuples, lists and dicts of them as an attention's arguments, got "
        f"{type(value).__name__}, which can't be split into samples: give tau in place of keep, or one sample at a time"
    )


def _joined(outputs: list[Any]) -> Any:
    """One output of a batch from those of its samples."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs)
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
