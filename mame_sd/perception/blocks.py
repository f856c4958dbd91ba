"""One block of a vision transformer, merged: x' = MSA(LN(x)) + x, x'' = MaMe(x'), MLP(LN(x'')) + x'' (paper,
"Integration for Visual Perception").

A `MergedBlock` stands in place of its block's forward and runs the block's own modules, so that hooks on these, their
weights and what is saved stay as they are. It checkpoints where its block would.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import MergePlan, plan_merge
from mame_sd.core.partition import GRIDS
from mame_sd.perception.counts import BlockCounts, width_of
from mame_sd.perception.families import Encoder

LATER = "the tokens of a block after the first that merges are no grid: partition 'alternating', without tiles"
UNKNOWN = "height and width unknown: merged with partition 'alternating' and without tiles"


class Pass:
    """What the blocks of one model share: whether they merge, and what the forward that runs knows.

    Attributes:
        active: False makes every call bit-equal to a model without merging.
        restore: the blocks' output has every token again.
        prop_attn: the log of a token's size is added to its attention logits.
        capture: plans are kept after the forward.
        image: (height, width) in pixels of the latest images; None where unknown.
        sizes: [B, L'] how many tokens each token stands for, in the forward that runs; None: 1 each.
        plans: those of the latest forward by number of block, while it runs or with `capture`.
    """

    def __init__(self, special: int, restore: bool, prop_attn: bool) -> None:
        self.special = special
        self.restore = restore
        self.prop_attn = prop_attn
        self.active = True
        self.capture = False
        self.image: tuple[int, int] | None = None
        self.begin()

    def begin(self, image: tuple[int, int] | None = None) -> None:
        """A forward begins."""
        self.running = True
        self.image = image
        self.sizes: Tensor | None = None
        self.plans: dict[int, MergePlan] = {}

    def end(self) -> None:
        """It ends: what only it needs is dropped."""
        self.running = False
        self.sizes = None
        if not self.capture:
            self.plans = {}

    def keep(self, number: int, plan: MergePlan) -> None:
        """Notes the plan of a block where it will be asked for (not when a checkpoint computes it again)."""
        if self.running and (self.restore or (self.capture and not torch.compiler.is_compiling())):
            self.plans[number] = plan

    def restored(self, tokens: Tensor) -> Tensor:
        """All tokens [B, L, C] of [B, L', C], by the plans of the latest forward, last block first."""
        for number in sorted(self.plans, reverse=True):
            tokens = self.plans[number].restore(tokens)
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        """Copies start without a forward."""
        return {**self.__dict__, "running": False, "sizes": None, "plans": {}}


class MergedBlock:
    """Takes the place of the forward of one block.

    Args:
        block: the block.
        encoder: what its modules are.
        number: which one it is, counted from 0.
        shared: of all blocks of the model.
        config: how its tokens merge; None: not at all (with `prop_attn`, later blocks read sizes).
        counts: counters of the blocks that merge, by number. In the first of them tokens are the image's patches.
    """

    def __init__(
        self,
        block: nn.Module,
        encoder: Encoder,
        number: int,
        shared: Pass,
        config: MaMeConfig | None,
        counts: Mapping[int, BlockCounts],
    ) -> None:
        self.block = block
        self.encoder = encoder
        self.number = number
        self.shared = shared
        self.counts = counts.get(number)
        self.first = number == min(counts)
        self._names = list(inspect.signature(type(block).forward).parameters)[1:]
        self.set(config)

    def set(self, config: MaMeConfig | None) -> None:
        """Merges by `config` from now on."""
        self.config = config
        self._needs_grid = config is not None and (config.partition in GRIDS or bool(config.tiles))
        self._plain = config
        if config is not None and self._needs_grid:
            self._plain = config.replace(partition="alternating", tiles=0, kernel=None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output [B, L', C], of tokens [B, L, C]."""
        shared, block = self.shared, self.block
        if not shared.active:
            return type(block).forward(block, *args, **kwargs)
        call = {**dict(zip(self._names, args, strict=False)), **kwargs}
        x = call.pop(self._names[0])
        if call.pop(self.encoder.mask, None) is not None or call.get("is_causal"):
            raise ValueError(
                "expected images without an attention mask (no padding, one resolution), got one: merged tokens have no "
                "place in it. Leave the mask out, or call remove_mame first"
            )
        run = partial(self._run, **call)
        if getattr(block, "gradient_checkpointing", False) and block.training:
            y, shared.sizes = block._gradient_checkpointing_func(run, x, shared.sizes)  # type: ignore[operator]
        else:
            y, shared.sizes = run(x, shared.sizes)
        return y

    def _run(self, x: Tensor, sizes: Tensor | None, **call: Any) -> tuple[Tensor, Tensor | None]:
        normed = self._module(self.encoder.attention[0])(x)
        x = x + self._attend(normed, sizes, call)
        if self.config is not None:
            merge = self._between_graphs if self.config.keep is None and _breaks_at_shapes() else self._merge
            x, sizes = merge(x, normed, sizes)
        y = x
        for part in self.encoder.mlp:
            y = self._module(part)(y)
        return x + y, sizes

    def _attend(self, normed: Tensor, sizes: Tensor | None, call: dict[str, Any]) -> Tensor:
        """The attention branch after its norm, [B, L, C]."""
        if sizes is not None:
            call = {**call, self.encoder.mask: sizes.log().to(normed.dtype)[:, None, None]}  # [B, 1, 1, L]
        attention, *rest = self.encoder.attention[1:]
        y = self._module(attention)(normed, **call)
        y = y[0] if isinstance(y, tuple) else y
        for part in rest:
            y = self._module(part)(y)
        return y

    def _merge(self, x: Tensor, normed: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x'' [B, L', C] of x' [B, L, C], and how many tokens each stands for where that counts."""
        plan = self._plan(x, normed)
        if self.shared.prop_attn:
            sizes = merged_sizes(plan, x.new_ones(x.shape[:2], dtype=torch.float32) if sizes is None else sizes)
        self.shared.keep(self.number, plan)
        return plan.merge(x), sizes

    @torch.compiler.disable
    def _between_graphs(self, x: Tensor, normed: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self._merge(x, normed, sizes)

    def _plan(self, x: Tensor, normed: Tensor) -> MergePlan:
        """The plan for x' [B, L, C], counted."""
        tokens, size, note, config = x.shape[1] - self.shared.special, None, "", self._plain
        if self._needs_grid:
            size = grid_of(tokens, self.shared.image) if self.first and self.encoder.grid else None
            note = "" if size else UNKNOWN if self.first else LATER
            config = self.config if size else self._plain
        feature = self._feature(x, normed)
        plan = plan_merge(feature, config, size, self.shared.special)
        pairs = plan.positions.blocks * plan.positions.m * plan.positions.n
        merging = pairs * (feature.shape[2] + x.shape[2])
        if self.shared.restore:
            merging += pairs * x.shape[2]
        if config.feature != "x":
            merging += x.shape[1] * x.shape[2] * width_of(self.block, self.encoder)
        assert self.counts is not None
        self.counts.add(x.shape[1], plan.tokens_kept, merging, "; ".join(filter(None, (note, plan.note))))
        return plan

    def _feature(self, x: Tensor, normed: Tensor) -> Tensor:
        """What similarity compares [B, L, d]: x', the block's keys, or these averaged over the heads."""
        assert self.config is not None
        if self.config.feature == "x":
            return x
        path = self.encoder.keys or ""
        linear, width = self._module(path), width_of(self.block, self.encoder)
        if linear.out_features == width:
            keys = linear(normed)
        else:  # queries, keys and values joined
            bias = None if linear.bias is None else linear.bias[width : 2 * width]
            keys = nn.functional.linear(normed, linear.weight[width : 2 * width], bias)
        if self.config.feature == "k":
            return keys
        owner = self._module(path.rpartition(".")[0])
        heads = getattr(owner, "num_attention_heads", None) or owner.num_heads
        return keys.unflatten(-1, (heads, -1)).mean(-2)

    def _module(self, path: str) -> Any:
        return self.block.get_submodule(path)


def _breaks_at_shapes() -> bool:
    """Whether this is being compiled, and not for shapes that depend on data: there each number of tokens would be compiled anew."""
    return torch.compiler.is_compiling() and not torch._dynamo.config.capture_dynamic_output_shape_ops


def grid_of(tokens: int, image: tuple[int, int] | None) -> tuple[int, int] | None:
    """(h, w) of patches of images [H, W] in pixels; None where no grid of their proportions has that many."""
    if image is None:
        return None
    h = round((tokens * image[0] / image[1]) ** 0.5)
    return (h, tokens // h) if h and tokens % h == 0 else None


def merged_sizes(plan: MergePlan, sizes: Tensor) -> Tensor:
    """How many tokens each merged token stands for [B, L'], of the sizes before [B, L]: what was shared out, summed up."""
    merged = plan.merge(sizes.unsqueeze(-1)).squeeze(-1)
    counts = plan.counts
    rest = merged.shape[1] - plan.special - counts.shape[1]
    ones = counts.new_ones(counts.shape[0], 1)
    return merged * torch.cat([ones.expand(-1, plan.special), counts, ones.expand(-1, rest)], 1)
