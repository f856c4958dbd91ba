"""A transformer's self-attention: the image's tokens merge, and what stands beside them in the call follows.

Text tokens may share the sequence or the call, rotary positions come one for each token, a video has frames: a `Family`
tells which. Text takes no part in merging. With `merge="kv"` the image's keys and values merge where they are attended to
(`keys.py`); with "qkv" tokens merge before the call, and rotary positions of merged tokens are those of the ones that stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.partition import positions
from mame_sd.core.plan import Plan
from mame_sd.diffusion.families.family import Family
from mame_sd.diffusion.families.keys import CountedKeys, MergedKeys
from mame_sd.diffusion.families.order import Order, start_of
from mame_sd.diffusion.families.samples import KeysBySample
from mame_sd.diffusion.families.unet import LAYER_SKIP, NOT_COUNTED, skips_scores
from mame_sd.diffusion.layer import Layer, LayerCall, Unmerged, compared
from mame_sd.diffusion.tokens import Call, Tokens

WHOLE = "queries merge too: {}"
KEYS_ONLY = "queries stay whole: in {} only keys and values can merge"
PICKED = "{}, where picking would drop queries too; take weights 'best' or 'average'"
PARTS = (
    "{}, which cuts the batch into parts; samples that keep their own tokens run alone (tau lets them keep the same)"
)


class SequenceAttention(Layer):
    """One attention module of a family."""

    def __init__(self, module: nn.Module, family: Family) -> None:
        super().__init__(module)
        self.family = family
        self.hidden = family.inputs[0]
        self._unseen: set[str] = set()  # processors that were seen to attend otherwise than over all tokens at once
        self._uncounted: set[str] = set()  # processors in which whole merged tokens were seen to count once

    def tokens(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Tokens | str:
        """The image's tokens, as the model around says; a reason where the call isn't as the family says, or too small."""
        hidden = call.arguments.get(self.hidden)
        if not isinstance(hidden, Tensor) or hidden.dim() not in ((3,) if self.family.queries else (2, 3, 4)):
            return "input is no tokens [B, L, C]"
        if hidden.dim() == 4:
            known = Tokens((hidden.shape[-2], hidden.shape[-1]))
        if known is None or known.unknown:
            return "height and width unknown" if known is None else known.unknown
        if config.feature != "x" and not hasattr(call.module, "to_k"):
            return f"feature={config.feature!r} asks for the layer's to_k, {type(call.module).__name__} has none"
        reason = self._skip_reason(call, known, config)
        if reason is None and self._whole_because(call, config) is not None:
            reason = self._unable(call, known, self.fitted(config, known)[0])
        return reason or known

    def feature(self, call: LayerCall, tokens: Tokens, config: MaMeConfig) -> Tensor:
        """The image's tokens, or their keys, in the order of the plane."""
        hidden = self._hidden(call)
        return compared(call.module, Order(tokens, hidden.shape[1]).image(hidden), config.feature)

    def merged(self, call: LayerCall, tokens: Tokens, plan: Plan, config: MaMeConfig) -> Any:
        """The attention's output: the image's tokens restored, all others as computed beside the merged ones."""
        hidden = self._hidden(call)
        order = Order(tokens, hidden.shape[1])
        if self._whole_because(call, config) is None:
            output, seen = self._with_merged_keys(call, order, plan, config)
            if seen:
                return output
            self._unseen.add(call.kind)
            reason = self._unable(call, tokens, config)
            if reason is not None:
                return Unmerged(output, reason)
            plan = self.detailed(plan, call, tokens, config)
        merged: dict[int, Tensor] = {}
        changes: dict[str, Any] = {}
        for name in self.family.inputs:
            value = call.arguments[name]
            if id(value) not in merged:
                merged[id(value)] = order.put(value, plan.merge(order.image(value)))
            changes[name] = merged[id(value)]
        sizes = self._sizes(call, order, plan, config)
        if self._alone(hidden.shape[0], tokens, config):
            kept, outputs = order.positions(plan.kept), []
            for i in range(kept.shape[0]):
                sample = self._sample(call, changes, order, kept, i)
                outputs.append(self._run(call, order, sample, None if sizes is None else sizes[i : i + 1]))
            return self._restored(_joined(outputs), order, plan)
        if self.family.select is not None:
            kept = order.positions(plan.kept).reshape(-1, plan.tokens_kept)[0]
            changes |= self.family.select(call.arguments, order.rows(kept))
        return self._restored(self._run(call, order, changes, sizes), order, plan)

    def restores(self, call: LayerCall, config: MaMeConfig) -> bool:
        """Where queries merge too."""
        return self._whole_because(call, config) is not None

    def count(self, call: LayerCall, known: Tokens | None) -> int:
        """The image's tokens; 0 where they are unknown."""
        return 0 if known is None or known.unknown else known.count

    def note(self, call: LayerCall, config: MaMeConfig) -> str:
        """Where queries merge though they are to stay whole, or merged tokens count once: why."""
        reason = self._whole_because(call, config)
        if reason and config.merge == "kv":
            return WHOLE.format(reason)
        if reason is None and config.merge == "qkv":
            return KEYS_ONLY.format(type(call.module).__name__)
        return NOT_COUNTED.format(call.kind) if config.correct and call.kind in self._uncounted else ""

    def _skip_reason(self, call: LayerCall, tokens: Tokens, config: MaMeConfig) -> str | None:
        """Why this call passes through untouched; None if it may merge."""
        family, given = self.family, call.arguments
        beside = given.get(family.text) is not None and family.text not in (*family.inputs, family.keys)
        if beside and not family.cross:
            return "cross-attention"
        for name in family.inputs:
            value = given.get(name)
            if not isinstance(value, Tensor) or start_of(_sequence(value).shape[1], tokens) is None:
                length = _sequence(value).shape[1] if isinstance(value, Tensor) else "no"
                return f"{length} tokens are not those of {' x '.join(map(str, tokens.size))}"
        if tokens.count < config.min_tokens:
            return f"fewer than min_tokens={config.min_tokens}"
        for name in family.leaves:
            if given.get(name) is not None:
                return f"{name} is given, with which it attends otherwise"
        mask = given.get("attention_mask")
        if mask is not None and not isinstance(mask, Tensor):
            return f"a {type(mask).__name__} in place of an attention mask: no softmax over all keys"
        if mask is not None and not family.mask:
            return "attention mask"
        return None

    def _whole_because(self, call: LayerCall, config: MaMeConfig) -> str | None:
        """Why queries merge too; None where keys and values merge alone."""
        if config.merge == "qkv" and self.family.queries:
            return "merge='qkv'"
        if _cuts_batches(call):
            return f"{call.kind} attends to parts of the batch"
        if skips_scores(call.module):
            return LAYER_SKIP
        if call.kind in self._unseen:
            return f"{call.kind} calls no scaled_dot_product_attention over all of the layer's tokens"
        if self._text(call) is not None and self.family.text_last is None:
            return f"the family {self.family.name} doesn't tell text_last, where the text's keys stand"
        return None

    def _unable(self, call: LayerCall, tokens: Tokens, config: MaMeConfig) -> str | None:
        """Why tokens can't merge before this call, queries included; None if they can."""
        if not self.family.queries:
            return f"{self._whole_because(call, config)}, where queries would have to merge too, which they can't"
        if config.weights == "pick":
            return PICKED.format(self._whole_because(call, config))
        batch = self._hidden(call).shape[0]
        if self.family.select is not None:
            reason = _unlike(call.arguments, self.family.select, tokens)
            if reason is not None:
                return reason
        if self._alone(batch, tokens, config):
            if _cuts_batches(call):
                return PARTS.format(call.kind)
            unknown = next((v for v in call.arguments.values() if not _splits(v)), None)
            if unknown is not None:
                return f"arguments of {type(unknown).__name__} can't be split into samples that keep their own tokens"
        return None

    def _hidden(self, call: LayerCall) -> Tensor:
        """The tokens [B, L, C] that a call comes with."""
        return _sequence(call.arguments[self.hidden])

    def _text(self, call: LayerCall) -> Tensor | None:
        """The text [B, T, C] of a joint call."""
        named = self.family.cross and self.family.text not in self.family.inputs
        text: Tensor | None = call.arguments.get(self.family.text) if named else None
        return None if text is None else _sequence(text)

    def _with_merged_keys(self, call: LayerCall, order: Order, plan: Plan, config: MaMeConfig) -> tuple[Any, bool]:
        """The attention's output of all queries, with the image's keys and values merged; and whether they were."""
        hidden = self._hidden(call)
        first, after = self._around(call, order)
        length, batch = first + plan.tokens_in + after, hidden.shape[0]
        drawn = config.weights == "best"
        how = order.to_plane, order.positions, config.correct, drawn
        keys: MergedKeys | KeysBySample
        if self.family.by_sample:
            keys = KeysBySample(plan, first, batch, *how)
        else:
            prefixed = self.family.cached is not None and self.family.cached(call.arguments)
            queries = hidden.shape[1], plan.tokens_in, length
            keys = MergedKeys(plan, first, length, batch, *how, queries=queries, prefixed=prefixed)
        with keys:  # Dynamo loses what `as` would name
            output = call.run()
        return output, keys.seen

    def _around(self, call: LayerCall, order: Order) -> tuple[int, int]:
        """How many keys stand before and after the image's, the text's own among them."""
        if self.family.keys is not None:
            beside = call.arguments[self.family.keys].shape[1] - order.tokens.count
            return (0, beside) if self.family.text_last else (beside, 0)
        text = self._text(call)
        beside = 0 if text is None else text.shape[1]
        after = self._hidden(call).shape[1] - order.stop
        return (order.first, after + beside) if self.family.text_last else (order.first + beside, after)

    def _sizes(self, call: LayerCall, order: Order, plan: Plan, config: MaMeConfig) -> Tensor | None:
        """How many tokens each whole merged one stands for, where attention is to count them: beside others that did not merge. None: all
        count once."""
        if not config.correct or not (plan.uneven or any(self._around(call, order))):
            return None
        apart = self._text(call) is not None and self.family.text_last is None  # nobody knows where it stands
        if apart or _takes_no_mask(call):
            self._uncounted.add(call.kind)
            return None
        return plan.sizes

    def _run(self, call: LayerCall, order: Order, changes: dict[str, Any], sizes: Tensor | None) -> Any:
        """The attention's output of merged tokens, that count as `sizes` says."""
        if sizes is None:
            return call.run(**changes)
        counting = CountedKeys(sizes, *self._around(call, order), changes[self.hidden].shape[0])
        with counting:  # Dynamo loses what `as`, or a call here, would give
            output = call.run(**changes)
        if not counting.seen:
            self._uncounted.add(call.kind)
        return output

    def _alone(self, batch: int, tokens: Tokens, config: MaMeConfig) -> bool:
        """Whether samples run one by one: they keep tokens of their own, and rotary positions are shared by a batch."""
        if self.family.select is None or config.keep is None or batch == 1:
            return False
        places = positions(tokens.count, config, tokens.plane)
        return 0 < tokens.count - max(places.M, round(config.keep * tokens.count)) < places.N

    def _sample(self, call: LayerCall, changes: dict[str, Any], order: Order, kept: Tensor, i: int) -> dict[str, Any]:
        """The arguments of sample `i` alone."""
        assert self.family.select is not None
        given = {**call.arguments, **changes, **self.family.select(call.arguments, order.rows(kept[i]))}
        return {name: _of_sample(value, kept.shape[0], i) for name, value in given.items()}

    def _restored(self, output: Any, order: Order, plan: Plan) -> Any:
        if isinstance(output, Tensor):
            return order.restored(output, plan)
        return tuple(
            order.restored(value, plan) if i in self.family.outputs else value for i, value in enumerate(output)
        )


def _sequence(t: Tensor) -> Tensor:
    """Tokens [B, L, C] of [B, L, C], of one sample's [L, C] or of an image [B, C, H, W]."""
    return t.flatten(2).transpose(1, 2) if t.dim() == 4 else t.unsqueeze(0) if t.dim() == 2 else t


def _takes_no_mask(call: LayerCall) -> bool:
    """Whether attention runs in a backend of diffusers that takes no mask."""
    backend = getattr(call.processor, "_attention_backend", None)
    return "flash" in str(getattr(backend, "value", backend))


def _cuts_batches(call: LayerCall) -> bool:
    """Whether the processor attends to parts of the batch apart (perturbed attention guidance)."""
    return call.kind.startswith("PAG")


def _unlike(given: Call, select: Any, tokens: Tokens) -> str | None:
    """Why the rows of this call's arguments are not those of its tokens; None where they are."""
    wrong: list[str] = []

    def look(t: Tensor, dim: int) -> Tensor:
        if start_of(t.shape[dim], tokens) is None:
            wrong.append(f"{t.shape[dim]} along dimension {dim} of {list(t.shape)}")
        return t

    select(given, look)
    before, after = ("any number" if n is None else n for n in (tokens.before, tokens.after))
    beside = f" (with {before} before and {after} after them)" if before or after else ""
    if not wrong:
        return None
    return f"expected one position for each of {tokens.count} image tokens{beside}, got {wrong[0]}"


def _splits(value: Any) -> bool:
    """Whether it can be told what each sample has of an argument."""
    if isinstance(value, (tuple, list)):
        return all(map(_splits, value))
    if isinstance(value, dict):
        return all(map(_splits, value.values()))
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def _of_sample(value: Any, batch: int, i: int, least: int = 2) -> Any:
    """What sample `i` has of an argument that `_splits`."""
    if isinstance(value, Tensor):
        return value[i : i + 1] if value.dim() >= least and value.shape[0] == batch else value
    if isinstance(value, (tuple, list)):  # of rotary positions: a first dimension of two counts tokens, never samples
        return type(value)(_of_sample(part, batch, i, least=3) for part in value)
    if isinstance(value, dict):
        return {name: _of_sample(part, batch, i, least) for name, part in value.items()}
    return value


def _joined(outputs: list[Any]) -> Any:
    """One output of a batch from those of its samples."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs)
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
