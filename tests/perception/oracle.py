"""A merging block in plain loops: x' = MSA(LN(x)) + x, x'' = MaMe(x'), y = MLP(LN(x'')) + x''.

The first half is the input of the block's second norm, the second the block's output with its
attention silenced, so that nothing is assumed about the modules between.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.groups import make_cells
from mame_sd.core.reference import group_tokens
from tests import oracle
from tests.builders.perception import FRAMES, Row, frames


def blocks_of(model: nn.Module, row: Row) -> list[Any]:
    """Return the blocks of the vision transformer, which have the row's norm and attention."""
    named = [
        (name, module)
        for name, module in model.named_modules()
        if {row.norm, row.attention} <= {child for child, _ in module.named_children()}
        and "text" not in name
    ]
    return [module for _, module in named]


def merged_oracle(
    model: nn.Module,
    row: Row,
    configs: dict[int, MaMeConfig],
    prop_attn: bool = False,
    size: tuple[int, int] | None = None,
) -> nn.Module:
    """Return a copy of `model` in float64 whose blocks in `configs` merge.

    With `prop_attn` later attentions add the log of sizes. The first of these blocks has a grid of
    `size`, by default a square; a video's frames are stacked vertically.
    """
    plane = "ViTMAE" not in row.name and any(
        isinstance(part, nn.Conv2d | nn.Conv3d) for part in model.modules()
    )
    if row.inputs is frames:
        size = (FRAMES // 2 * 3, 3)
    model = copy.deepcopy(model).double()
    sizes: list[Tensor] = []  # after each merging of the forward that runs
    blocks = blocks_of(model, row)
    blocks[min(configs)].register_forward_pre_hook(lambda *_: sizes.clear())
    for number, block in enumerate(blocks):
        if prop_attn and number > min(configs):
            attention = block.get_submodule(row.attention)
            if hasattr(attention, "attention") and hasattr(attention.attention, "query"):
                attention.register_forward_hook(_spelled_out(sizes))  # no mask can be given to it
            else:
                attention.register_forward_pre_hook(_counting(sizes, attention), with_kwargs=True)
        if number in configs:
            block.forward = _forward(
                block,
                row,
                configs[number],
                sizes,
                prop_attn,
                (size or "square") if plane and number == min(configs) else None,
            )
    return model


def _spelled_out(sizes: list[Tensor]) -> Any:
    """Attention with the log of sizes in its logits, a head at a time."""

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        inner, x, heads = module.attention, args[0], []
        width = inner.attention_head_size
        q, k, v = inner.query(x), inner.key(x), inner.value(x)
        if getattr(inner, "q_bias", None) is not None:  # VideoMAE before 5.5 adds them itself
            q, v = q + inner.q_bias, v + inner.v_bias
        q, k, v = (part.split(width, -1) for part in (q, k, v))
        for head in range(len(q)):
            logits = q[head] @ k[head].mT / width**0.5 + sizes[-1].log()[:, None]
            heads.append(logits.softmax(-1) @ v[head])
        return module.output.dense(torch.cat(heads, -1))

    return hook


def _counting(sizes: list[Tensor], attention: nn.Module) -> Any:
    names = inspect.signature(attention.forward).parameters
    mask = next(name for name in ("attn_mask", "attention_mask") if name in names)

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args[:1], {**kwargs, mask: sizes[-1].log()[:, None, None]}

    return hook


def _forward(
    block: Any,
    row: Row,
    config: MaMeConfig,
    sizes: list[Tensor],
    prop_attn: bool,
    size: Any,
) -> Any:
    norm, attention = block.get_submodule(row.norm), block.get_submodule(row.attention)
    inside = dict(attention.named_modules())
    projection = next(inside[name] for name in ("k_proj", "attention.key", "qkv") if name in inside)

    def silenced(module: nn.Module, args: Any, output: Any) -> Any:
        return (
            (torch.zeros_like(output[0]), *output[1:])
            if isinstance(output, tuple)
            else torch.zeros_like(output)
        )

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen: list[Tensor] = []
        normed: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        other = attention.register_forward_pre_hook(
            lambda module, given, named: normed.append([*given, *named.values()][0]),
            with_kwargs=True,
        )
        type(block).forward(block, x, *args, **kwargs)
        hook.remove()
        other.remove()
        keys = projection(normed[0])
        if keys.shape[-1] > x.shape[-1]:  # queries, keys and values joined
            keys = keys.unflatten(-1, (3, -1))[..., 1, :]
        feature = keys if config.tau is None else seen[0]
        plan = _plan(feature, config, size, row.prefix)
        before = sizes[-1] if sizes else torch.ones_like(seen[0][..., 0])
        merged = plan.merge(seen[0])
        if prop_attn:  # means over all that tokens stand for
            merged = plan.merge(seen[0] * before[..., None]) / plan.merge(before[..., None])
        sizes.append(plan.merge(before[..., None])[..., 0] * plan.held(merged))
        hook = attention.register_forward_hook(silenced)
        y = type(block).forward(block, merged, *args, **kwargs)
        hook.remove()
        return y

    return forward


class _Groups:
    """Hard groups of tokens [B, L, d] behind prefix ones, by the angle of what is compared."""

    def __init__(self, feature: Tensor, keep: float, size: Any, prefix: int) -> None:
        body = torch.nn.functional.normalize(feature[:, prefix:].double(), dim=-1)
        count = body.shape[1]
        if size == "square":
            size = (round(count**0.5), round(count**0.5))
        cells = make_cells(size or (count,), min(keep, 0.25 if size else 0.5), 0, None)
        dst, whole = [cells.order[cells.dst[0]]], [torch.arange(count)]
        kept = max(len(dst[0]), round(keep * count))
        self.groups = [group_tokens(sample, whole, dst, kept).tolist() for sample in body]
        self.prefix = prefix

    def merge(self, t: Tensor) -> Tensor:
        rows = [
            torch.cat([sample[: self.prefix], oracle.means(sample[self.prefix :], groups)[0]])
            for sample, groups in zip(t.double(), self.groups, strict=True)
        ]
        return torch.stack(rows)

    def held(self, merged: Tensor) -> Tensor:
        """Of how many rows each merged one is the mean."""
        held = torch.ones_like(merged[..., 0])
        for row, groups in zip(held, self.groups, strict=True):
            for number in set(groups):
                row[self.prefix + number] = groups.count(number)
        return held


class _Paper:
    """The paper's plan."""

    def __init__(self, feature: Tensor, config: MaMeConfig, prefix: int) -> None:
        assert config.tau is not None
        self.plan = oracle.token_plan(feature, config.tau, prefix=prefix)

    def merge(self, t: Tensor) -> Tensor:
        return self.plan.merge(t)

    def held(self, merged: Tensor) -> Tensor:
        held = torch.ones_like(merged[..., 0])
        first, m = self.plan.prefix, len(self.plan.dst)
        held[:, first : first + m] = 1 + self.plan.weights.sum(-1)
        return held


def _plan(feature: Tensor, config: MaMeConfig, size: Any, prefix: int) -> Any:
    if config.tau is not None:
        return _Paper(feature, config, prefix)
    assert config.keep is not None
    return _Groups(feature, config.keep, size, prefix)
