"""Merges an image's keys and values within a call of attention, and leaves its queries.

A transformer's processor projects, normalises and rotates queries, keys and values, puts text
beside the image, and calls `torch.nn.functional.scaled_dot_product_attention`. `MergedKeys`
intercepts that call, so all that came before stays as it is. Text is untouched, and rotary
positions are in the keys already. A batch runs in one call though samples merge apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mame_sd.core import fused, tiled_plan
from mame_sd.core.correction import (
    Drawn,
    Lacking,
    add_by_kernel,
    added_by_kernels,
    apart_from,
    first_order,
    first_order_of_means,
    joined,
    moments,
)
from mame_sd.core.partition import constant, counting
from mame_sd.core.pick_plan import PickPlan
from mame_sd.core.plan import (
    GROUPING,
    Groups,
    Plan,
    RowPlan,
    group_means,
    groups_of,
    groups_of_heads,
    rows_of,
)
from mame_sd.core.tiled_plan import TiledPlan
from mame_sd.diffusion.layer import Tokens

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Attending(TorchFunctionMode, ABC):
    """While entered, `attend` stands in for the calls of scaled_dot_product_attention."""

    @abstractmethod
    def attend(self, attention: Callable[..., Tensor], call: dict[str, Any]) -> Tensor:
        """The output of a call, whose arguments are given by name; `attention` is the function that
        was called.
        """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:
            # A Python method, which torch.compile follows only where it is called as one.
            return args[0].unflatten(*args[1:], **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self.attend(func, {**dict(zip(_NAMES, args, strict=False)), **kwargs})


def attended(attention: Callable[..., Tensor], call: Mapping[str, Any], **changes: Any) -> Tensor:
    """The output of `call` with `changes`."""
    call = {**call, **changes}
    return attention(call.pop("query"), call.pop("key"), call.pop("value"), **call)


def scale_of(call: Mapping[str, Any]) -> float:
    """By what the logits of a call are multiplied."""
    scale: float = call.get("scale") or call["query"].shape[-1] ** -0.5
    return scale


def corrected(
    attention: Callable[..., Tensor],
    call: Mapping[str, Any],
    lacks: Lacking,
    share: float = 1.0,
    **changes: Any,
) -> Tensor:
    """The output of `call` with `changes`, key and value among them, and what those lack to first
    order, of a `share` of all tokens.
    """
    query, value, shift = call["query"], changes["value"], lacks.shift
    free = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    product, scale = lacks.covariance, (call.get("scale") or query.shape[-1] ** -0.5) * share
    if free:  # in one operation, rounded on the way
        product = torch.mul(product, scale, out=torch.empty_like(product, dtype=value.dtype))
        if shift is not None:
            changes["value"] = torch.add(value, shift, out=torch.empty_like(value))
    else:
        product = (product * scale).to(value.dtype)
        if shift is not None:
            changes["value"] = (value + shift).to(value.dtype)
    lacking = product.transpose(-1, -2)
    output = attended(attention, call, **changes)
    # Another function than PyTorch's may return the same tensor again.
    ours = attention is F.scaled_dot_product_attention
    alike = ours and output.dim() == 4 and output.dtype == query.dtype == lacking.dtype
    if not (alike and free):
        return output + (query @ lacking).to(output.dtype)
    if output.is_contiguous() and query.is_contiguous():
        output.flatten(0, 1).baddbmm_(query.flatten(0, 1), lacking.flatten(0, 1))
        return output
    # In the layout of both, [n, H, D]: all samples in one call would copy them.
    for sample, its_query, its_lacking in zip(output, query, lacking, strict=True):
        sample.baddbmm_(its_query, its_lacking)
    return output


def log_sizes(sizes: Tensor, like: Tensor) -> Tensor:
    """A mask [..., 1, N'] in the dtype of `like` that counts keys `sizes` times, [..., N']."""
    exact = sizes.to(torch.promote_types(like.dtype, torch.float32))
    if torch.compiler.is_compiling():
        return exact.log().to(like.dtype).unsqueeze(-2)
    return torch.log(exact, out=torch.empty_like(exact, dtype=like.dtype)).unsqueeze(-2)


def key_sizes(sizes: Tensor, before: int, after: int, like: Tensor) -> Tensor:
    """How many tokens each key stands for, [L'] or [B, 1, L'] (for `like` of three dimensions [B,
    L']). Merged keys stand for their `sizes`, those before and after them for themselves.
    """
    every = F.pad(sizes.to(like.device), (before, after), value=1.0)
    return every if sizes.dim() == 1 or like.dim() == 3 else every.unsqueeze(1)


def proportional_mask(mask: Tensor | None, query: Tensor, sizes: Tensor | None) -> Tensor | None:
    """The mask, and the logarithm of how many keys each one stands for where `sizes` are given.

    Merged keys would else weigh too little against text: n equal keys weigh as much as one whose
        logit is greater by log n.
    """
    if sizes is None:
        return mask
    weight = log_sizes(sizes, query)
    if mask is None:
        return weight
    return torch.where(mask, weight, -torch.inf) if mask.dtype == torch.bool else mask + weight


class CountedKeys(Attending):
    """While entered, attention over merged tokens and what stands beside them counts each key as
    often as it stands for tokens.

    Args:
        sizes: of the merged tokens, [L'] or [B, L'].
        before, after: tokens that stand before and after them.
        batch: samples of the call that is meant.
    """

    def __init__(self, sizes: Tensor, before: int, after: int, batch: int) -> None:
        super().__init__()
        self._sizes, self._before, self._after, self._batch = sizes, before, after, batch
        self.seen = False  # whether such a call came

    def attend(self, attention: Callable[..., Tensor], call: dict[str, Any]) -> Tensor:
        """See `Attending`."""
        query, key = call["query"], call["key"]
        length = self._before + self._sizes.shape[-1] + self._after
        few = (
            query.shape[-2] == self._sizes.shape[-1] and key.shape[-2] == length
        )  # queries of the image alone
        if not (key.shape[-2] == length == query.shape[-2] or few) or key.shape[0] != self._batch:
            return attended(attention, call)  # not this layer's own
        self.seen = True
        sizes = key_sizes(self._sizes, self._before, self._after, query)
        mask = call.get("attn_mask")
        counted = log_sizes(sizes, query) if mask is None else proportional_mask(mask, query, sizes)
        return attended(attention, call, attn_mask=counted)


class GroupedKeys(Attending):
    """While entered, attention counts each key as often as it stands for tokens.

    This is attention whose keys and values are made of `keys_of`. It also adds what the merged keys
    lack to first order (`core/correction.py`).

    Args:
        plan: of all tokens; every source went to one destination whole. Only where it is uneven
            keys are counted, which needs a mask, without which some devices are faster.
        correct: add what merged keys lack, estimated from the sample of the plan's positions, to
            which none attends.
    """

    def __init__(self, plan: Plan, correct: bool = True) -> None:
        super().__init__()
        self.plan = plan
        self.correct = correct

    def keys_of(self, hidden: Tensor) -> Tensor:
        """What keys and values are to be made of: of tokens [B, L, C] the merged ones, and after
        them the sample.
        """
        plan = self.plan
        if not self.correct:
            return plan.merge(hidden)
        if isinstance(plan, RowPlan):
            return plan.with_sample(hidden)
        return torch.cat(
            [plan.merge(hidden), hidden.index_select(1, plan.positions.sample)], 1
        )  # a rival's

    def attend(self, attention: Callable[..., Tensor], call: dict[str, Any]) -> Tensor:
        """See `Attending`; queries, keys and values [B, H, n, D]."""
        plan, drawn = self.plan, self.plan.positions.samples if self.correct else 0
        if call["key"].shape[-2] != plan.tokens_kept + drawn or call.get("attn_mask") is not None:
            return attended(attention, call)  # not this layer's own
        key, value = (call[name][:, :, : plan.tokens_kept] for name in ("key", "value"))
        sizes = plan.sizes.unsqueeze(-2)  # alike in all heads
        fewer = {
            "key": key,
            "value": value,
            "attn_mask": log_sizes(sizes, call["query"]) if plan.uneven else None,
        }
        if not self.correct:
            return attended(attention, call, **fewer)
        lacking = None
        if isinstance(plan, RowPlan) and plan.by_kernels:
            sample = Drawn(call["key"], call["value"], plan.tokens_kept, apart=True)
            counts = plan.sizes
            lacking = added_by_kernels(
                plan, (key, value), 0, sample, counts, scale_of(call), plan.uneven
            )
        if lacking is not None:
            return add_by_kernel(
                attended(attention, call, **fewer),
                call["query"],
                lacking,
                in_place=attention is F.scaled_dot_product_attention,
            )
        if isinstance(plan, RowPlan):
            rows = plan.sample_rows.unsqueeze(1)
        else:
            rows = plan.rows.index_select(1, plan.positions.sample).unsqueeze(1)
        means, drawn_too = joined(call["key"], call["value"]).split([plan.tokens_kept, drawn], -2)
        given = None if plan.uneven else means, sizes, plan.tokens_in
        lacks = first_order_of_means(apart_from(means, drawn_too, rows), key.shape[-1], *given)
        return corrected(attention, call, lacks, **fewer)


class MergedKeys(Attending):
    """While entered, attention over all of a sequence by itself has the image's keys and values
    merged.

    Args:
        plan: of the image's tokens.
        tokens: how these lie.
        shape: (samples, keys) of the call that is meant; attention over others (an image prompt's)
            runs as it is.
        first: where the image's keys begin.
        correct: add what the merged keys lose to first order (`core/correction.py`), where there is
            no mask.
        drawn: estimate that from the sample of the plan's positions; every source went to one
            destination whole.
        queries: how many queries the call that is meant may have beside as many as keys.
        prefixed: keys of earlier calls, of any number, stand before these.
    """

    def __init__(
        self,
        plan: Plan,
        tokens: Tokens,
        shape: Sequence[int],
        first: int = 0,
        correct: bool = False,
        drawn: bool = False,
        queries: Sequence[int] = (),
        prefixed: bool = False,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.queries, self.prefixed = queries, prefixed
        self.tokens = tokens
        self.batch, self.length = shape[:2]
        self.first = first
        self.correct = correct
        self.drawn = drawn
        self.seen = False  # whether such a call came
        self._groups: dict[bool, Groups] = {}  # by whether each head's keys lie together
        self._picked: Tensor | None = None  # made where it is needed first

    def attend(self, attention: Callable[..., Tensor], call: dict[str, Any]) -> Tensor:
        """See `Attending`."""
        query, key, value, mask = call["query"], call["key"], call["value"], call.get("attn_mask")
        if self.prefixed and key.shape[-2] > self.length:
            self.first += key.shape[-2] - self.length
            self.length = key.shape[-2]
        alike = key.shape[-2] == self.length == query.shape[-2]
        few = key.shape[-2] == self.length and query.shape[-2] in self.queries
        if not (alike or few) or key.shape[0] != self.batch:
            return attended(attention, call)
        self.seen = True
        alone = self.length == self.plan.tokens_in  # the image's keys are all there are
        if (
            mask is None
            and key.dim() == 4
            and isinstance(self.plan, RowPlan)
            and self.plan.by_kernels
            and fused.on(query, key, value)
        ):
            output = self._attend_fused(
                attention, call, self.plan, proportional=self.plan.uneven or not alone
            )
            if output is not None:
                return output
        if mask is None and isinstance(self.plan, TiledPlan) and tiled_plan.on(query, key, value):
            return self._attend_tiled(attention, call, self.plan, self.plan.uneven or not alone)
        sizes = None if alone and not self.plan.uneven else self.sizes(query)
        if mask is not None:
            counted = proportional_mask(self.columns(mask), query, sizes)
        else:
            counted = None if sizes is None else log_sizes(sizes, query)
        kept_key, kept_value = self.merged(key, value)
        fewer = {
            "key": kept_key,
            "value": kept_value,
            "attn_mask": counted,
        }
        if (
            not self.correct
            or mask is not None
            or call.get("is_causal")
            or query.shape[:-2] != key.shape[:-2]
        ):
            return attended(attention, call, **fewer)
        lacks = self.lacking((key, value), (kept_key, kept_value), sizes)
        return corrected(attention, call, lacks, self.share, **fewer)

    def _attend_fused(
        self,
        attention: Callable[..., Tensor],
        call: dict[str, Any],
        plan: RowPlan,
        proportional: bool,
    ) -> Tensor | None:
        """`attend` by kernels; None where PyTorch's operations have to do it.

        `proportional`: logits count the keys.
        """
        query, key, value, size = call["query"], call["key"], call["value"], self.tokens.size
        around = self.first, self.length - self.first - plan.tokens_in
        kept = fused.means(plan, key, size, around, proportional=proportional)
        kept_value = None if kept is None else fused.means(plan, value, size, around)
        if kept is None or kept_value is None:
            return None
        mask = kept[2][:, None, None] if proportional else None
        fewer: dict[str, Any] = {"key": kept[0], "value": kept_value[0], "attn_mask": mask}
        if not self.correct or call.get("is_causal") or query.shape[:-2] != key.shape[:-2]:
            return attended(attention, call, **fewer)
        if not self.drawn:
            lacks = self.lacking(
                (key, value),
                (kept[0], kept_value[0]),
                kept[1].unsqueeze(1) if proportional else None,
            )
            return corrected(attention, call, lacks, **fewer)
        drawn, scale = Drawn(key, value, self.first, False, size), scale_of(call) * self.share
        lacking = added_by_kernels(
            plan, (kept[0], kept_value[0]), self.first, drawn, kept[1], scale, proportional
        )
        if lacking is None:
            return None
        return add_by_kernel(
            attended(attention, call, **fewer),
            query,
            lacking,
            in_place=attention is F.scaled_dot_product_attention,
        )

    def _attend_tiled(
        self,
        attention: Callable[..., Tensor],
        call: dict[str, Any],
        plan: TiledPlan,
        proportional: bool,
    ) -> Tensor:
        """`attend` in few operations; `proportional`: logits count the keys."""
        query, key, value, pos = call["query"], call["key"], call["value"], plan.positions
        width, after = key.shape[3], self.length - self.first - plan.tokens_in
        at = self.tokens.places(pos.slots.flatten())
        at = at + self.first if self.first else at
        every, slots = plan.pairs(key, value, at, self.first, after)
        kept = [t.transpose(1, 2) for t in (every[..., :width], every[..., width:])]
        mask = log_sizes(self.sizes(query), query) if proportional else None
        fewer: dict[str, Any] = {"key": kept[0], "value": kept[1], "attn_mask": mask}
        if not self.correct or call.get("is_causal") or query.shape[:-2] != key.shape[:-2]:
            return attended(attention, call, **fewer)
        if not self.drawn:
            sizes = self.sizes(query) if proportional else None
            lacks = self.lacking((key, value), (kept[0], kept[1]), sizes)
            return corrected(attention, call, lacks, **fewer)
        means = every[:, self.first : self.first + plan.tokens_kept]
        drawn = slots.index_select(1, pos.sample_slot)
        its = means.gather(1, plan.sample_rows[..., None, None].expand(drawn.shape))
        lead = drawn.shape[0], drawn.shape[2], drawn.shape[1], drawn.shape[3]  # [B, H, n, D + D']
        apart = query.new_empty(lead, dtype=torch.float32)
        torch.sub(drawn.transpose(1, 2), its.transpose(1, 2), out=apart)
        joint = None if proportional else joined(*kept)
        lacks = first_order_of_means(apart, width, joint, plan.sizes.unsqueeze(1), plan.tokens_in)
        return corrected(attention, call, lacks, self.share, **fewer)

    def lacking(
        self, every: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor], sizes: Tensor | None
    ) -> Lacking:
        """What the `kept` keys and values lack, counted by `sizes`, of those of `every` token."""
        plan = self.plan
        if not self.drawn:
            return first_order(moments(*every), moments(*kept, sizes))
        at = self.tokens.places(plan.positions.sample) + self.first
        means = joined(*(t.narrow(-2, self.first, plan.tokens_kept) for t in kept))
        drawn = joined(*(t.index_select(-2, at) for t in every))
        rows = plan.rows[:, plan.positions.sample]
        rows = rows.unsqueeze(1) if every[0].dim() == 4 else rows  # alike in all heads
        counts = self.sizes(every[0]) if sizes is None else sizes
        counts = counts.narrow(-1, self.first, plan.tokens_kept)
        given = means if sizes is None else None, counts, plan.tokens_in
        return first_order_of_means(apart_from(means, drawn, rows), every[0].shape[-1], *given)

    @property
    def share(self) -> float:
        """Of all keys, those that `lacking` tells of."""
        return self.plan.tokens_in / self.length if self.drawn else 1.0

    @property
    def kept(self) -> Tensor:
        """[n'] or [B, n'], positions of the merged tokens among the image's."""
        return self.tokens.places(self.plan.kept)

    def sizes(self, like: Tensor) -> Tensor:
        """How many keys each of the merged ones stands for, [L'] or [B, 1, L'] (for `like` of three
        dimensions [B, L']).
        """
        return key_sizes(
            self.plan.sizes, self.first, self.length - self.first - self.plan.tokens_in, like
        )

    def merged(self, *tensors: Tensor) -> list[Tensor]:
        """Keys or values [B, H, L', D] of each [B, H, L, D], or [B, L', D] of [B, L, D]."""
        first = tensors[0]
        if first.dim() == 3:
            return [t.squeeze(1) for t in self.merged(*(t.unsqueeze(1) for t in tensors))]
        by_rows = isinstance(self.plan, RowPlan) or getattr(self.plan, "by_rows", False)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if by_rows and not learns and first.device.type in GROUPING:
            return self._means(tensors)
        if isinstance(self.plan, PickPlan) and self.plan.kept.dim() == 1:  # all samples the same
            return [t.index_select(2, self._every_kept()) for t in tensors]
        merged, last = [], self.first + self.plan.tokens_in
        for t in tensors:
            tokens = t.transpose(1, 2)  # [B, L, H, D], as they were projected
            image = self._merged_image(tokens[:, self.first : last].flatten(2))
            image = image.unflatten(2, t.shape[1::2])
            if self.length > self.plan.tokens_in:  # others stand beside it
                image = torch.cat([tokens[:, : self.first], image, tokens[:, last:]], 1)
            merged.append(image.transpose(1, 2))
        return merged

    def _means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`merged` in one operation each.

        The heads of t [B, H, L, D] are read as they lie, and the means lie alike. Each token of
        text is a group of its own.
        """
        means, kept = [], self.length - self.plan.tokens_in + self.plan.tokens_kept
        for t in tensors:
            (batch, heads, _, width), apart = t.shape, t.is_contiguous()
            if apart not in self._groups:
                groups = groups_of(self._rows(), kept)
                self._groups[apart] = groups_of_heads(groups, batch, heads) if apart else groups
            rows = t.flatten(0, 2) if apart else t.transpose(1, 2).flatten(2).flatten(0, 1)
            mean = group_means(rows, self._groups[apart])
            shape = (batch, heads, kept, width) if apart else (batch, kept, heads, width)
            means.append(mean.view(shape) if apart else mean.view(shape).transpose(1, 2))
        return means

    def _rows(self) -> Tensor:
        """Which of the merged keys each one went to, [B, L]."""
        plan, last = self.plan, self.first + self.plan.tokens_in
        rows, fewer = plan.rows + self.first, plan.tokens_in - plan.tokens_kept
        at = self.tokens.places(torch.arange(plan.tokens_in, device=rows.device)) + self.first
        every = torch.arange(self.length, device=rows.device)
        others = torch.where(every < last, every, every - fewer)
        return others.expand(rows.shape[0], -1).index_copy(1, at, rows)

    def _every_kept(self) -> Tensor:
        """[L'], positions of the kept tokens and those around them."""
        if self._picked is None:
            every = constant(counting, self.length, self.kept.device)
            around = every[: self.first], every[self.first + self.plan.tokens_in :]
            self._picked = (
                self.kept
                if self.length == self.plan.tokens_in
                else torch.cat(
                    [around[0], self.kept + self.first if self.first else self.kept, around[1]]
                )
            )
        return self._picked

    def _merged_image(self, image: Tensor) -> Tensor:
        """[B, n', C] of the image's tokens [B, n, C]."""
        if isinstance(
            self.plan, PickPlan
        ):  # straight from where they stand: the plane's order would copy all of them
            return rows_of(image, self.kept)
        return self.plan.merge(self.tokens.to_plane(image))

    def columns(self, mask: Tensor) -> Tensor:
        """The mask [..., Q, L'] of the merged keys, whose entries are those of the tokens that
        stay.
        """
        if mask.shape[-1] == 1:
            return mask
        every = torch.arange(self.length, device=mask.device)
        last = self.first + self.plan.tokens_in
        kept = self.kept.to(mask.device) + self.first
        if kept.dim() == 1:
            return mask.index_select(-1, torch.cat([every[: self.first], kept, every[last:]]))
        rows = [
            every[: self.first].expand(self.batch, -1),
            kept,
            every[last:].expand(self.batch, -1),
        ]
        mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
        index = torch.cat(rows, 1)[:, None, None].expand(-1, mask.shape[1], mask.shape[2], -1)
        return mask.expand(self.batch, -1, -1, -1).gather(-1, index)
