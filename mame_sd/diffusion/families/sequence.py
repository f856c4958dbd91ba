"""A transformer's self-attention: merges the image's tokens, and selects what belongs to each token
in the same call.

Text tokens may share the sequence or the call, rotary positions come one for each token, a video
has frames: a `Family` tells which. Text takes no part in merging. With `merge="kv"` the image's
keys and values merge within the call of attention (`keys.py`). With "qkv" tokens merge before the
call, and a merged token has the rotary position of its destination.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.partition import positions
from mame_sd.core.plan import Plan
from mame_sd.core.similarity import merged_by_keep
from mame_sd.diffusion.families.family import Family, Rows
from mame_sd.diffusion.families.keys import Attending, CountedKeys, MergedKeys
from mame_sd.diffusion.families.references import JoinedPlan
from mame_sd.diffusion.families.samples import KeysBySample
from mame_sd.diffusion.families.unet import BUILT_IN, LAYER_SKIP, NOT_COUNTED, is_own
from mame_sd.diffusion.layer import (
    Call,
    Layer,
    LayerCall,
    Output,
    Reference,
    Route,
    Step,
    Tokens,
    compared,
    settings_for,
    skips_scores,
)

QUERIES_TOO = "queries merge too: {}"
KEYS_ONLY = "queries stay whole: in {} only keys and values can merge"
PICKED = "{}, where picking would drop queries too; take weights 'best' or 'average'"
CUT = (
    "{}, which cuts the batch into parts; samples that keep their own tokens run alone (tau lets"
    " them keep the same)"
)


class SequenceAttention(Layer):
    """One attention module of a family."""

    early = False

    def __init__(self, module: nn.Module, family: Family) -> None:
        super().__init__(module)
        self.family = family
        self.hidden = family.inputs[0]
        self._unseen: set[str] = (
            set()
        )  # processors that were seen to attend otherwise than over all tokens at once

    def route(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Route | str:
        """See `Layer`."""
        family, given = self.family, call.given
        hidden = given.get(self.hidden)
        if not isinstance(hidden, Tensor) or hidden.dim() not in (
            (3,) if family.queries else (2, 3, 4)
        ):
            return "input is no tokens [B, L, C]"
        if hidden.dim() == 4:
            known = Tokens((hidden.shape[-2], hidden.shape[-1]))
        if known is None or known.unknown:
            return "height and width unknown" if known is None else known.unknown
        if config.feature != "x" and not hasattr(call.module, "to_k"):
            return (
                f"feature={config.feature!r} asks for the layer's to_k,"
                f" {type(call.module).__name__} has none"
            )
        hidden = hidden if hidden.dim() == 3 else _sequence(hidden)
        first = known.start(hidden.shape[1])
        reason = _skip_reason(family, given, known, config, first)
        if reason is not None:
            return reason
        first = first or 0
        note = ""
        if known.plane is None:
            config, note = settings_for(config, known)
        text = _text(family, given)
        before, after = first, hidden.shape[1] - first - known.count
        context = 0 if text is None else text.shape[1]
        if family.keys is not None:  # the image's tokens among them
            context = given[family.keys].shape[1] - known.count
        before, after = (before, after + context) if family.text_last else (before + context, after)
        because = self._queries_because(call, text, config)
        form: Any = self._keys_merged
        if because is None and config.merge == "qkv":
            note = ". ".join(filter(None, (note, KEYS_ONLY.format(type(call.module).__name__))))
        if because is not None:
            # Rotary positions are shared by a batch, so samples with tokens of their own run apart.
            alone = family.select is not None and config.keep is not None and hidden.shape[0] > 1
            alone = alone and _keeps_own_tokens(known, config)
            reason = _refusal(family, call, known, config, because, alone)
            if reason is not None:
                return reason
            form = self._samples_merged if alone else self._tokens_merged
            if config.merge == "kv":
                note = ". ".join(filter(None, (note, QUERIES_TOO.format(because))))
        feature = known.to_plane(hidden[:, first : first + known.count])
        if config.feature != "x":
            feature = compared(call.module, feature, config.feature)
        references: tuple[Reference, ...] = ()
        if config.of_references is not None and form == self._keys_merged:
            references = _references(call, hidden, first + known.count, known, config)
        return Route(call, form, config, known, feature, note, references, first, before, after)

    def joined(self, plan: Plan, route: Route, step: Step) -> Plan:
        """See `Layer`."""
        parts = [(plan, route.tokens)]
        for tokens, feature in route.references:
            config: Any = route.config.of_references
            config, _ = settings_for(config, tokens)
            alone = replace(route, config=config, tokens=tokens, feature=feature, references=())
            parts.append((self.plan(alone, step), tokens))
        return JoinedPlan(parts)

    def count(self, call: LayerCall, known: Tokens | None) -> int:
        """The image's tokens."""
        hidden = call.given.get(self.hidden)
        if isinstance(hidden, Tensor) and hidden.dim() == 4:
            return int(hidden.shape[2] * hidden.shape[3])
        return 0 if known is None or known.unknown else known.count

    def _queries_because(
        self, call: LayerCall, text: Tensor | None, config: MaMeConfig
    ) -> str | None:
        """Why queries merge too; None where keys and values merge alone."""
        if config.merge == "qkv" and self.family.queries:
            return "merge='qkv'"
        if call.kind.startswith("PAG"):  # perturbed attention guidance
            return f"{call.kind} attends to parts of the batch"
        if skips_scores(call.module):
            return LAYER_SKIP
        if call.kind in self._unseen:
            return (
                f"{call.kind} calls no scaled_dot_product_attention over all of the layer's tokens"
            )
        if text is not None and self.family.text_last is None:
            return (
                f"the family {self.family.name} doesn't tell text_last, where the text's keys stand"
            )
        return None

    def _keys_merged(self, route: Route, plan: Plan) -> Output | None:
        """The attention's output of all queries, with the image's keys and values merged."""
        length, tokens = route.before + route.tokens.count + route.after, route.tokens
        if route.references:
            tokens = Tokens((plan.tokens_in,))  # in their own order, that of the plan
        shape, config = (route.feature.shape[0], length), route.config
        how: dict[str, Any] = {"correct": config.correct, "drawn": config.weights == "best"}
        keys: MergedKeys | KeysBySample
        if self.family.by_sample:
            keys = KeysBySample(plan, tokens, shape[0], route.before, **how)
        else:
            cached = self.family.cached is not None and self.family.cached(route.call.given)
            given = route.call.given[self.hidden]
            given = given if given.dim() == 3 else _sequence(given)
            queries = given.shape[1], route.tokens.count, length
            keys = MergedKeys(
                plan, tokens, shape, route.before, queries=queries, prefixed=cached, **how
            )
        if _is_joint(route.call):
            output = joint_attention(route.call.module, route.call.given, keys)
        else:
            with keys:  # Dynamo loses what `as` would name
                output = route.call.run()
        if keys.seen:
            return Output(output)
        self._unseen.add(route.call.kind)
        return None

    def _tokens_merged(self, route: Route, plan: Plan) -> Output:
        """The attention's output of merged tokens, restored; all others as computed beside them."""
        changes, call = _with_merged_inputs(self.family, route, plan), route.call
        if self.family.select is not None:  # all samples keep the same tokens
            kept = route.tokens.places(plan.kept).reshape(-1, plan.tokens_kept)[0]
            changes |= self.family.select(call.given, _rows(route.tokens, kept))
        sizes, note = self._sizes(route, plan)
        output, unseen = self._run(route, changes, sizes)
        restored = self._restored(output, changes[self.hidden], route, plan)
        return Output(restored, "" if route.note else note or unseen)

    def _samples_merged(self, route: Route, plan: Plan) -> Output:
        """The same sample by sample: they keep tokens of their own, and rotary positions are shared
        by a batch.
        """
        assert self.family.select is not None
        changes, call = _with_merged_inputs(self.family, route, plan), route.call
        sizes, note = self._sizes(route, plan)
        kept, outputs = route.tokens.places(plan.kept), []
        for i in range(kept.shape[0]):
            given = {
                **call.given,
                **changes,
                **self.family.select(call.given, _rows(route.tokens, kept[i])),
            }
            sample = {name: _of_sample(value, kept.shape[0], i) for name, value in given.items()}
            output, unseen = self._run(route, sample, None if sizes is None else sizes[i : i + 1])
            outputs.append(output)
        restored = self._restored(_joined(outputs), changes[self.hidden], route, plan)
        return Output(restored, "" if route.note else note or unseen)

    def _sizes(self, route: Route, plan: Plan) -> tuple[Tensor | None, str]:
        """How many tokens each merged one stands for, where attention is to count them: beside
        others that did not merge. None: all count once, and why if they should not.
        """
        if not route.config.correct or not (plan.uneven or route.before or route.after):
            return None, ""
        nowhere = self.family.text_last is None and _text(self.family, route.call.given) is not None
        backend = getattr(route.call.processor, "_attention_backend", None)
        if nowhere or "flash" in str(getattr(backend, "value", backend)):  # takes no mask
            return None, NOT_COUNTED.format(route.call.kind)
        return plan.sizes, ""

    def _run(self, route: Route, changes: dict[str, Any], sizes: Tensor | None) -> tuple[Any, str]:
        """The attention's output of merged tokens that count as `sizes` says, and a note where they
        were seen not to.
        """
        if sizes is None:
            return route.call.run(**changes), ""
        counting = CountedKeys(sizes, route.before, route.after, changes[self.hidden].shape[0])
        if _is_joint(route.call):
            given = {**route.call.given, **changes}
            output = joint_attention(route.call.module, given, counting)
        else:
            with counting:  # Dynamo loses what `as`, or a call here, would give
                output = route.call.run(**changes)
        return output, "" if counting.seen else NOT_COUNTED.format(route.call.kind)

    def _restored(self, output: Any, merged: Tensor, route: Route, plan: Plan) -> Any:
        """All tokens from an output [B, L', ...], or from those in a tuple, in the call's order.

        `merged`: the inputs that the outputs are of.
        """
        alone, restored, end = isinstance(output, Tensor), [], route.first + plan.tokens_kept
        detail = route.detail(merged[:, route.first : end])
        for i, y in enumerate((output,) if alone else output):
            if i in self.family.outputs or alone:
                flat = y.flatten(2)
                image = plan.restore(flat[:, route.first : end], detail)
                if len(route.tokens.size) == 3:
                    image = route.tokens.from_plane(image)
                if flat.shape[1] > plan.tokens_kept:
                    image = torch.cat([flat[:, : route.first], image, flat[:, end:]], 1)
                y = image.unflatten(2, y.shape[2:])
            restored.append(y)
        return restored[0] if alone else tuple(restored)


def _references(
    call: LayerCall, hidden: Tensor, start: int, known: Tokens, config: MaMeConfig
) -> tuple[Reference, ...]:
    """The reference images in the sequence [B, L, C], from `start` on; none where it ends there."""
    found = []
    for tokens in map(Tokens, known.references):
        image = hidden[:, start : start + tokens.count]
        start += tokens.count
        if start > hidden.shape[1]:
            return ()
        found.append(
            Reference(tokens, compared(call.module, tokens.to_plane(image), config.feature))
        )
    return tuple(found)


def joint_attention(attn: Any, given: Call, attending: Attending) -> Any:
    """What diffusers' own processor of text beside an image computes (`JointAttnProcessor2_0`).

    Ours, because a mode that watches for its attention is asked at each of its 35 operations.
    """
    hidden, text = given["hidden_states"], given.get("encoder_hidden_states")
    batch, heads = hidden.shape[0], attn.heads
    shape = batch, -1, heads, attn.inner_dim // heads
    projected = [
        [project(t).view(shape).transpose(1, 2) for project in of]
        for t, of in (
            (hidden, (attn.to_q, attn.to_k, attn.to_v)),
            (text, () if text is None else (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)),
        )
    ]
    norms = [(attn.norm_q, attn.norm_k, None)]
    if text is not None:
        norms.append((attn.norm_added_q, attn.norm_added_k, None))
    normed = [
        [t if norm is None else norm(t) for norm, t in zip(of, parts, strict=True)]
        for of, parts in zip(norms, projected, strict=False)
    ]
    query, key, value = (
        parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in zip(*normed, strict=True)
    )
    call = {"query": query, "key": key, "value": value, "dropout_p": 0.0, "is_causal": False}
    output = attending.attend(F.scaled_dot_product_attention, call)
    output = output.transpose(1, 2).reshape(batch, -1, attn.inner_dim).to(query.dtype)
    length = hidden.shape[1]
    image = attn.to_out[1](attn.to_out[0](output[:, :length]))
    if text is None:
        return image
    behind = output[:, length:]
    return image, behind if attn.context_pre_only else attn.to_add_out(behind)


def _is_joint(call: LayerCall) -> bool:
    """Whether `joint_attention` gives what a call does."""
    plain = F.scaled_dot_product_attention is BUILT_IN
    return plain and type(call.processor) is JointAttnProcessor2_0 and is_own(call)


def _skip_reason(
    family: Family, given: Call, tokens: Tokens, config: MaMeConfig, first: int | None
) -> str | None:
    """Why this call passes through untouched; None if it may merge.

    `first`: where the tokens begin in the first of the inputs.
    """
    joint = given.get(family.text) is not None and family.text not in (*family.inputs, family.keys)
    if joint and not family.cross:
        return "cross-attention"
    for name in family.inputs:
        value = given.get(name)
        if isinstance(value, Tensor) and value.dim() != 3:
            value = _sequence(value)
        known = name == family.inputs[0] and first is not None
        if not known and (not isinstance(value, Tensor) or tokens.start(value.shape[1]) is None):
            length = value.shape[1] if isinstance(value, Tensor) else "no"
            return f"{length} tokens are not those of {' x '.join(map(str, tokens.size))}"
    if tokens.count < config.min_tokens:
        return f"fewer than min_tokens={config.min_tokens}"
    for name in family.leaves:
        if given.get(name) is not None:
            return f"{name} is given, with which it attends otherwise"
    mask = given.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        return f"a {type(mask).__name__} instead of an attention mask: no softmax over all keys"
    if mask is not None and not family.mask:
        return "attention mask"
    return None


def _refusal(
    family: Family, call: LayerCall, tokens: Tokens, config: MaMeConfig, because: str, alone: bool
) -> str | None:
    """Why tokens can't merge before this call, queries included; None if they can.

    Args:
        because: why queries merge too.
        alone: samples run one by one.
    """
    if not family.queries:
        return f"{because}, where queries would have to merge too, which they can't"
    if config.weights == "pick":
        return PICKED.format(because)
    if family.select is not None:
        reason = _unlike(call.given, family.select, tokens)
        if reason is not None:
            return reason
    if alone:
        if call.kind.startswith("PAG"):
            return CUT.format(call.kind)
        unknown = next((v for v in call.given.values() if not _splits(v)), None)
        if unknown is not None:
            return (
                f"arguments of {type(unknown).__name__} can't be split into samples that keep their"
                " own tokens"
            )
    return None


def _text(family: Family, given: Call) -> Tensor | None:
    """The text of a joint call."""
    named = family.cross and family.text not in family.inputs
    text: Tensor | None = given.get(family.text) if named else None
    return text if text is None or text.dim() == 3 else _sequence(text)


def _sequence(t: Tensor) -> Tensor:
    """Tokens [B, L, C] of [B, L, C], of one sample's [L, C] or of an image [B, C, H, W]."""
    return t.flatten(2).transpose(1, 2) if t.dim() == 4 else t.unsqueeze(0) if t.dim() == 2 else t


def _keeps_own_tokens(tokens: Tokens, config: MaMeConfig) -> bool:
    """Whether samples keep tokens of their own."""
    assert config.keep is not None
    partition = positions(tokens.count, config, tokens.plane)
    return 0 < merged_by_keep(partition, config.keep) < partition.N


def _with_merged_inputs(family: Family, route: Route, plan: Plan) -> dict[str, Any]:
    """The inputs, the image's tokens in them merged, those before and after them as they are."""
    tokens, merged, feature = route.tokens, {}, route.config.feature
    for value in (route.call.given[name] for name in family.inputs):
        if id(value) not in merged:
            if value.shape[1] == tokens.count:
                hidden = value is route.call.given[family.inputs[0]] and feature == "x"
                image = route.feature if hidden else tokens.to_plane(value)
                merged[id(value)] = plan.merge(image)
                continue
            start = tokens.start(value.shape[1]) or 0
            rest = value.shape[1] - start - tokens.count
            before, image, after = value.split([start, tokens.count, rest], 1)
            image = plan.merge(tokens.to_plane(image))
            merged[id(value)] = torch.cat([before, image, after], 1)
    return {name: merged[id(route.call.given[name])] for name in family.inputs}


def _rows(tokens: Tokens, kept: Tensor) -> Rows:
    """Picks the rows of the `kept` tokens along a dimension that counts the image's, or the whole
    sequence's.
    """

    def pick(t: Tensor, dim: int) -> Tensor:
        start = tokens.start(t.shape[dim]) or 0
        index = kept.to(t.device) + start
        every = torch.arange(t.shape[dim], device=t.device)
        return t.index_select(dim, torch.cat([every[:start], index, every[start + tokens.count :]]))

    return pick


def _unlike(given: Call, select: Any, tokens: Tokens) -> str | None:
    """Why the rows of this call's arguments are not those of its tokens; None where they are."""
    wrong: list[str] = []

    def look(t: Tensor, dim: int) -> Tensor:
        if tokens.start(t.shape[dim]) is None:
            wrong.append(f"{t.shape[dim]} along dimension {dim} of {list(t.shape)}")
        return t

    select(given, look)
    before, after = ("any number" if n is None else n for n in (tokens.before, tokens.after))
    others = f" (with {before} before and {after} after them)" if before or after else ""
    if not wrong:
        return None
    return f"expected one position for each of {tokens.count} image tokens{others}, got {wrong[0]}"


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
    if isinstance(
        value, (tuple, list)
    ):  # of rotary positions: a first dimension of two counts tokens, never samples
        return type(value)(_of_sample(part, batch, i, least=3) for part in value)
    if isinstance(value, dict):
        return {name: _of_sample(part, batch, i, least) for name, part in value.items()}
    return value


def _joined(outputs: list[Any]) -> Any:
    """One output of a batch from those of its samples."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs)
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
