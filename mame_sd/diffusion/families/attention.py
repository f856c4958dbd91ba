"""Decide how calls of self-attention merge.

In a transformer, text may share the sequence or the call, rotary positions are passed for each
token, and a video has frames: a `Family` describes this (`SequenceAttention`). In UNets, DiT and
PixArt the attention reads nothing but the tokens of one image (`PlainAttention`).

Text does not merge. With `keep` the image's keys and values merge within the attention call, and
the processor computes everything else. With `tau` tokens merge before the call, and a merged token
has the rotary position of its destination.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.fit import SDPA
from mame_sd.core.groups import equal_at_end, unreadable
from mame_sd.core.intercept import KernelAdapter
from mame_sd.core.merge_keys import constant_along
from mame_sd.core.min_tokens import head_width, kernel_of, too_wide
from mame_sd.core.paper import Plan
from mame_sd.diffusion.context import Call, Tokens
from mame_sd.diffusion.families.family import Family, Rows
from mame_sd.diffusion.families.processors import (
    COUNT_TEXT,
    PLAIN,
    PLAIN_PROCESSORS,
    STOOD_IN_FOR,
    processed,
)
from mame_sd.diffusion.families.transformers import IMAGE_ALONE
from mame_sd.diffusion.layer import (
    EVERY,
    NO_SIZE,
    AttentionAdapter,
    LayerCall,
    MergeKeys,
    MergeTokens,
    Route,
    Skip,
)

KEYS_ONLY = "in {} only keys merge: give keep instead of tau"
LAYER_SKIP = (
    "diffusers' layer skip replaces attention by the values only if there are as many as queries;"
    " use tau with it"
)
NOT_PLAIN = (
    "{} may do more than attention, such as keep its map, which would be that of fewer tokens: give"
    " keep instead of tau"
)
MASK_HIDES = "an attention mask that hides some of the image's tokens"
MASK_UNREAD = "an attention mask whose numbers no compiled graph can read"
STOOD_IN = "computed by AttnProcessor2_0 in place of {}"


class SequenceAttention(AttentionAdapter):
    """Adapter of one attention module of a family.

    Args:
        module: the module. If None, the arguments' names and the width of a head are unknown.
        family: its family.
    """

    def __init__(self, module: nn.Module | None, family: Family) -> None:
        super().__init__(module)
        self.family = family
        self.hidden = family.inputs[0]
        self.width = None if module is None else head_width(module)
        self.repeats_text = family.equal_text

    def with_one_of_equal(
        self, call: LayerCall, layout: Tokens | None, kernel: KernelAdapter | None
    ) -> tuple[LayerCall, int] | None:
        """Return a call with one of the equal text tokens, see `AttentionAdapter`.

        The mask that counts it is free in a CPU's fused kernel alone, and 16 bits would round it.
        """
        text = call.arguments.get(self.family.text)
        unwrapped = getattr(call.forward, "__func__", None) is type(call.module).forward
        masked = call.arguments.get("attention_mask") is not None
        if text is None or masked or not unwrapped or type(call.processor) not in COUNT_TEXT:
            return None
        if F.scaled_dot_product_attention is not SDPA or (kernel and not kernel.takes_bias):
            return None
        on_cpu = text.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        if not on_cpu or text.dtype != torch.float32:
            return None
        repeats = equal_at_end(text)
        if repeats == 1 or isinstance(self.route(call, layout, EVERY), Skip):
            return None
        one = {**call.arguments, self.family.text: text[:, : 1 - repeats]}
        return call._replace(arguments=one), repeats

    def route(self, call: LayerCall, layout: Tokens | None, config: MaMeConfig) -> Route:
        """Decide how a call merges, see `AttentionAdapter`."""
        family, arguments = self.family, call.arguments
        hidden = arguments.get(self.hidden)
        if not isinstance(hidden, Tensor) or hidden.dim() not in (
            (3,) if family.queries else (2, 3, 4)
        ):
            return Skip("input is not tokens [B, L, C]")
        if hidden.dim() == 4:
            layout = Tokens((hidden.shape[-2], hidden.shape[-1]))
        if layout is None or layout.unknown:
            return Skip("height and width unknown" if layout is None else layout.unknown)
        if layout.references and not family.references:
            layout = replace(layout, references=())
        hidden = hidden if hidden.dim() == 3 else _sequence(hidden)
        alone = hidden.shape[1] == layout.count and not (layout.before or layout.after)
        start = 0 if alone else layout.start(hidden.shape[1])
        reason = _skip_reason(self, call, layout, config, start, hidden)
        if reason is not None:
            return Skip(reason)
        first = start or 0
        if config.tau is not None:
            if not family.queries:
                return Skip(KEYS_ONLY.format(type(call.module).__name__))
            unlike = _unlike(arguments, family.select, layout) if family.select else None
            if unlike is not None:
                return Skip(unlike)
            feature = hidden[:, first : first + layout.count]
            return MergeTokens(call, config, layout, first, feature)
        hooks = getattr(getattr(call.module, "_diffusers_hook", None), "hooks", {})
        if any(getattr(hook, "skip_attention_scores", False) for hook in hooks.values()):
            return Skip(LAYER_SKIP)
        before, after = first, hidden.shape[1] - first - layout.count
        text = 0 if family.joint is None else _text_length(family, arguments, layout)
        last = None if text is None else after + text if family.joint == "last" else after
        before += (text or 0) if family.joint == "first" else 0
        cached = family.cached is not None and family.cached(arguments)
        job = {"queries": hidden.shape[1], "prefixed": cached}
        note = NO_SIZE if len(layout.size) == 1 else ""
        return MergeKeys(call, config, layout, first, before, last, note, job=job)

    def count(self, call: LayerCall, layout: Tokens | None) -> int:
        """Return the number of the image's tokens, or 0 if it is unknown."""
        hidden = call.arguments.get(self.hidden)
        if isinstance(hidden, Tensor) and hidden.dim() == 4:
            return int(hidden.shape[2] * hidden.shape[3])
        return 0 if layout is None or layout.unknown else layout.count

    def with_merged_tokens(self, route: MergeTokens, plan: Plan) -> Any:
        """Compute the attention of merged tokens and restore them, see `AttentionAdapter`.

        Text and other tokens keep the output that was computed with the merged tokens.
        """
        changes, call = _with_merged_inputs(self.family, route, plan), route.call
        if self.family.select is not None:
            changes |= self.family.select(call.arguments, _rows(route.tokens, plan.kept))
        output = call.run(**changes)
        alone, restored, end = isinstance(output, Tensor), [], route.first + plan.tokens_kept
        for i, y in enumerate((output,) if alone else output):
            if i in self.family.outputs or alone:
                flat = y.flatten(2)
                image = plan.restore(flat[:, route.first : end])
                if flat.shape[1] > plan.tokens_kept:
                    image = torch.cat([flat[:, : route.first], image, flat[:, end:]], 1)
                y = image.unflatten(2, y.shape[2:])
            restored.append(y)
        return restored[0] if alone else tuple(restored)


class PlainAttention(SequenceAttention):
    """Adapter of a diffusers Attention that reads the tokens of one image alone.

    The installed processor computes the attention, and its own steps before and after it. A
    processor whose attention call can't be intercepted is replaced by diffusers'
    `AttnProcessor2_0`.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(module, IMAGE_ALONE)

    def route(self, call: LayerCall, layout: Tokens | None, config: MaMeConfig) -> Route:
        """Decide how a call merges, see `AttentionAdapter`.

        If `layout` is None, `guessed` gives the layout of the tokens.
        """
        # The adapter of one module was made because the module can merge. Its processor may change.
        if self.width is None and (reason := fixed_reason(call.module)) is not None:
            return Skip(reason)
        if "Linear" in call.kind:
            return Skip("linear attention")
        if call.kind == "MaMeAttnProcessor":
            return Skip(f"a {call.kind} on the module merges already")
        if config.tau is not None and call.kind not in PLAIN_PROCESSORS:
            return Skip(NOT_PLAIN.format(call.kind))
        hidden = call.arguments.get(self.hidden)
        if layout is None and isinstance(hidden, Tensor) and hidden.dim() == 3:
            layout = guessed(hidden.shape[1], config.size)
        route = super().route(call, layout, config)
        stood_in = type(call.processor) in STOOD_IN_FOR  # not the user's derived classes
        if not isinstance(route, MergeKeys) or not stood_in:
            return route
        notes = filter(None, (route.note, STOOD_IN.format(call.kind)))
        run = partial(processed, PLAIN, call.module, **call.arguments)
        scale = {} if call.module.scale_qk else {"scale": call.module.scale}
        return replace(route, note=". ".join(notes), run=run, job={**route.job, **scale})

    def count(self, call: LayerCall, layout: Tokens | None) -> int:
        """Return the number of tokens, even if their layout is unknown."""
        return AttentionAdapter.count(self, call, layout)

    def with_merged_tokens(self, route: MergeTokens, plan: Plan) -> Tensor:
        """Compute the attention [B, L, C] of merged tokens and restore them (MaMe, then MaRe)."""
        merged = plan.merge(route.call.arguments[self.hidden])
        return plan.restore(route.call.run(hidden_states=merged))


def guessed(length: int, size: tuple[int, int] | None) -> Tokens:
    """Guess the layout of `length` tokens of an image.

    Args:
        length: number of tokens.
        size: latent height and width. The tokens are a level of this size, whose sides halve from
            level to level, rounded up. If None, the tokens are a square, or else their layout is
            unknown.
    """
    count = index(length)  # sizes may be symbols under torch.compile
    if size is None:
        side = math.isqrt(count)
        return Tokens((side, side) if side * side == count else (count,))
    h, w = size
    while h * w > count and h * w > 1:
        h, w = math.ceil(h / 2), math.ceil(w / 2)
    return Tokens(
        (h, w), unknown="" if h * w == count else f"{count} tokens are no level of {size=}"
    )


def fixed_reason(attn: Any) -> str | None:
    """Return why `PlainAttention` can never merge this module, or None if it can.

    The reason does not depend on the arguments of a call.
    """
    if not isinstance(attn, Attention):
        return f"{type(attn).__name__} is not a diffusers Attention"
    reasons = {
        "cross-attention": attn.is_cross_attention or attn.only_cross_attention,
        "added keys and values": attn.added_kv_proj_dim is not None,
        "normalises over space": attn.group_norm is not None or attn.spatial_norm is not None,
        "adds its own input to its output": attn.residual_connection,
        "normalises encoder states": attn.norm_cross,
        "linear attention": "Linear" in type(attn.processor).__name__,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _skip_reason(
    layer: SequenceAttention,
    call: LayerCall,
    tokens: Tokens,
    config: MaMeConfig,
    first: int | None,
    hidden: Tensor,
) -> str | None:
    """Return why this call of a layer is not merged, or None if it may merge.

    `hidden` is the first of the inputs, [B, L, C], and `first` the position of the first token in
    it. If `first` is None, the tokens aren't in it.
    """
    family, arguments = layer.family, call.arguments
    joint = arguments.get(family.text) is not None and family.text not in family.inputs
    if joint and family.joint is None:
        return "cross-attention"
    for name in family.inputs:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.dim() != 3:
            value = _sequence(value)
        located = name == family.inputs[0] and first is not None
        if not located and (not isinstance(value, Tensor) or tokens.start(value.shape[1]) is None):
            length = value.shape[1] if isinstance(value, Tensor) else "no"
            return f"{length} tokens are not those of {' x '.join(map(str, tokens.size))}"
    merging = tokens.count
    if tokens.references and config.reference_share is not None:
        merging += sum(math.prod(size) for size in tokens.references)
    if config.min_tokens is None:
        width = head_width(call.module) if layer.width is None else layer.width
        kernel = kernel_of(hidden.device, hidden.dtype, width)
        if merging < kernel.least:
            return kernel.too_few
        if config.is_default and (wide := too_wide(merging, hidden.shape[-1])):
            return wide
    elif merging < config.min_tokens:
        return f"fewer than min_tokens={config.min_tokens}"
    for name in family.leaves:
        if arguments.get(name) is not None:
            return f"{name} is given, with which it attends otherwise"
    mask = arguments.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        return f"a {type(mask).__name__} instead of an attention mask: no softmax over all keys"
    if mask is not None and not family.mask:
        return "attention mask"
    return None


def _text_length(family: Family, arguments: Call, tokens: Tokens) -> int | None:
    """Return the number of text keys that a joint call adds to those of its tokens.

    It is 0 if there is no text, and None if each sample has its own number.
    """
    if family.text_keys is not None:
        return family.text_keys(arguments, tokens)
    text = None if family.text in family.inputs else arguments.get(family.text)
    if text is None:
        return 0
    return int(text.shape[-2] if text.dim() < 4 else text.shape[2:].numel())


def _sequence(t: Tensor) -> Tensor:
    """Return tokens [B, L, C] of [B, L, C], of one sample's [L, C] or of an image [B, C, H, W]."""
    return t.flatten(2).transpose(1, 2) if t.dim() == 4 else t.unsqueeze(0) if t.dim() == 2 else t


def _with_merged_inputs(family: Family, route: MergeTokens, plan: Plan) -> dict[str, Any]:
    """Return the inputs by name, with the image's tokens merged and other tokens as they are."""
    tokens, merged = route.tokens, {}
    for value in (route.call.arguments[name] for name in family.inputs):
        if id(value) not in merged:
            start = tokens.start(value.shape[1]) or 0
            rest = value.shape[1] - start - tokens.count
            before, image, after = value.split([start, tokens.count, rest], 1)
            merged[id(value)] = torch.cat([before, plan.merge(image), after], 1)
    return {name: merged[id(route.call.arguments[name])] for name in family.inputs}


def _rows(tokens: Tokens, kept: Tensor) -> Rows:
    """Return a function that selects the rows of the `kept` tokens along a dimension.

    The dimension counts the image's tokens or those of the whole sequence.
    """

    def pick(t: Tensor, dim: int) -> Tensor:
        start = tokens.start(t.shape[dim]) or 0
        index = kept.to(t.device) + start
        every = torch.arange(t.shape[dim], device=t.device)
        return t.index_select(dim, torch.cat([every[:start], index, every[start + tokens.count :]]))

    return pick


def _unlike(arguments: Call, select: Any, tokens: Tokens) -> str | None:
    """Return why whole tokens of this call can't merge, or None if they can.

    Either an argument's rows don't match the tokens, or a mask hides some of the tokens.
    """
    wrong: list[str] = []
    masked: list[str] = []

    def look(t: Tensor, dim: int) -> Tensor:
        start = tokens.start(t.shape[dim])
        if start is None:
            wrong.append(f"{t.shape[dim]} along dimension {dim} of {list(t.shape)}")
        elif t is arguments.get("attention_mask"):
            if unreadable(t):
                masked.append(MASK_UNREAD)
            elif not constant_along(t.narrow(dim, start, tokens.count), dim):
                masked.append(MASK_HIDES)
        return t

    select(arguments, look)
    before, after = ("any number" if n is None else n for n in (tokens.before, tokens.after))
    others = f" (with {before} before and {after} after them)" if before or after else ""
    if not wrong:
        return masked[0] if masked else None
    return f"expected one position for each of {tokens.count} image tokens{others}, got {wrong[0]}"
