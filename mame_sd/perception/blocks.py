"""One block of a vision transformer, merged: x' = MSA(LN(x)) + x, x'' = MaMe(x'), MLP(LN(x'')) +
x'' (paper, "Integration for Visual Perception").

A `MergedBlock` replaces its block's forward and runs the block's own modules. So their hooks, their
weights and what is saved stay as they are. It checkpoints where its block would.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import plan_merge
from mame_sd.core.partition import GRIDS, positions
from mame_sd.core.plan import Plan, RowPlan, no_autocast
from mame_sd.core.similarity import similarity_of
from mame_sd.perception.counts import BlockCounts, width_of
from mame_sd.perception.known_encoders import Encoder
from mame_sd.perception.settings import DEFAULTS
from mame_sd.perception.shared import ForwardState

LATER = (
    "the tokens of a block after the first that merges are no grid: partition 'alternating',"
    " without tiles"
)
UNKNOWN = "height and width unknown: merged with partition 'alternating' and without tiles"


def weighted(plan: Plan, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Merges tokens x [B, L, C] that stand for sizes [B, L] of tokens. Returns means over all of
    these [B, L', C], and their sizes [B, L'].
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    held, summed = plan.sizes, plan.summed(sizes)
    if isinstance(
        plan, RowPlan
    ):  # weights of mean 1 in each group: a token that merges with none stays to the bit
        weight = sizes * held.gather(1, plan.rows) / summed.gather(1, plan.rows)
        y = plan.merge(exact * weight.unsqueeze(-1).to(exact.dtype))
    else:
        y = plan.merge(exact * sizes.unsqueeze(-1).to(exact.dtype)) / (summed / held).unsqueeze(
            -1
        ).to(exact.dtype)
    return y.to(x.dtype), summed


def as_many(
    feature: Tensor, config: MaMeConfig, size: tuple[int, int] | None, special: int
) -> MaMeConfig:
    """Settings by which all samples of a batch keep equally many tokens: the most that tau keeps.

    Each sample chooses its tokens by itself.

    Args:
        feature: that is compared [B, L, d].
        config: with tau.
        size: (h, w) of the patches; None where unknown.
        special: leading tokens that take no part.
    """
    body = feature.detach()[:, special:]
    pos = positions(body.shape[1], config, size, body.device, None)
    with no_autocast(body):
        best = similarity_of(body, pos, config.metric).amax(-2)  # [B, T, n]
    assert config.tau is not None
    merges = (best > config.tau).flatten(1).index_select(1, pos.src_real).sum(1)
    return config.replace(tau=None, keep=(pos.L - int(merges.min())) / pos.L)


class MergedBlock:
    """Replaces the forward of one block.

    Args:
        block: the block.
        encoder: what its modules are.
        number: which one it is, counted from 0.
        shared: of all blocks of the model.
        config: how its tokens merge; None: not at all (with `prop_attn`, later blocks read sizes).
        counts: counters of the blocks that merge, by number. In the first of them tokens are the
            image's patches.
    """

    def __init__(
        self,
        block: nn.Module,
        encoder: Encoder,
        number: int,
        shared: ForwardState,
        config: MaMeConfig | None,
        counts: Mapping[int, BlockCounts],
    ) -> None:
        self.block = block
        self.encoder = encoder
        self.number = number
        self.shared = shared
        self.counts = counts.get(number)
        self.first = number == min(counts)
        self.alone = len(counts) == 1
        self._counts_calls = False  # not where a checkpoint computes again
        self.heard: Tensor | None = (
            None  # [B, L, d] what the attention's projection to keys gave in this call
        )
        parameters = inspect.signature(type(block).forward).parameters.values()
        self._names = [one.name for one in parameters if one.kind != one.VAR_KEYWORD][1:]
        self.set(config)

    def set(self, config: MaMeConfig | None) -> None:
        """Merges by `config` from now on."""
        self.config = config
        self._needs_grid = config is not None and (config.partition in GRIDS or bool(config.tiles))
        if config is not None:
            chosen = all(
                config.given.get(name) == DEFAULTS[name] for name in ("partition", "stride")
            )
            self._asked = not chosen or bool(config.tiles)  # for a grid, other than by default
            self._plain = (
                config.replace(partition="alternating", tiles=0) if self._needs_grid else config
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output [B, L', C], of tokens [B, L, C]."""
        shared, block = self.shared, cast(Any, self.block)
        if not shared.active:
            return type(block).forward(block, *args, **kwargs)
        call = {**dict(zip(self._names, args, strict=False)), **kwargs}
        x = call.pop(self._names[0])
        if call.pop(self.encoder.mask, None) is not None or call.get("is_causal"):
            raise ValueError(
                "expected images without an attention mask (no padding, one resolution), got one:"
                " merged tokens have no place in it. Leave the mask out, or call remove_mame first"
            )
        run: Any = partial(self._run, **call)
        checkpoints = getattr(block, "gradient_checkpointing", False) and block.training
        if (
            checkpoints and type(block).__call__ is nn.Module.__call__
        ):  # else around this call, as in transformers 5.0
            run = partial(block._gradient_checkpointing_func, run)
        if self.first:
            shared.begin()
        self._counts_calls = True
        y, sizes = run(
            x, shared.sizes, None if shared.again else shared.grid
        )  # as arguments, which checkpoints keep
        shared.sizes = (
            sizes if self.number < shared.last else None
        )  # a graph of gradients hangs on them
        shared.note(y)
        self._counts_calls = False
        return y

    def _run(
        self, x: Tensor, sizes: Tensor | None, grid: tuple[int, int] | None, **call: Any
    ) -> tuple[Tensor, Tensor | None]:
        normed = self._module(self.encoder.attention[0])(x)
        x = x + self._attend(normed, sizes, call)
        if self.config is not None:
            merge = (
                self._between_graphs
                if torch.compiler.is_compiling() and self._breaks(len(x))
                else self._merge
            )
            x, sizes = merge(x, normed, sizes, grid)
        y = x
        for part in self.encoder.mlp:
            y = self._module(part)(y)
        return x + y, sizes

    def _attend(self, normed: Tensor, sizes: Tensor | None, call: dict[str, Any]) -> Tensor:
        """The attention branch after its norm, [B, L, C]."""
        attention, *rest = self.encoder.attention[1:]
        mask = (
            None if sizes is None else sizes.log().to(normed.dtype)[:, None, None]
        )  # [B, 1, 1, L]
        if mask is not None and self.encoder.attend is not None:
            y = self.encoder.attend(self._module(attention), normed, mask)
        else:
            y = self._module(attention)(
                normed, **(call if mask is None else {**call, self.encoder.mask: mask})
            )
        y = y[0] if isinstance(y, tuple) else y
        for part in rest:
            y = self._module(part)(y)
        return y

    def _merge(
        self, x: Tensor, normed: Tensor, sizes: Tensor | None, grid: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor | None]:
        """x'' [B, L', C] of x' [B, L, C], and how many tokens each stands for where that counts.

        `grid`: (h, w) of the image's patches.
        """
        assert self.config is not None
        assert self.counts is not None
        tokens, least = x.shape[1], self.config.min_tokens
        if tokens - self.shared.special < least:
            if self._counts_calls:
                self.counts.add(tokens, tokens, 0, f"fewer than min_tokens={least}")
            return x, sizes
        plan = self._plan(x, normed, sizes, grid)
        if self._counts_calls:
            self.shared.keep(self.number, plan)
        if sizes is not None:
            return weighted(plan, x, sizes)
        return plan.merge(x), plan.sizes if self._sized else None

    @property
    def _sized(self) -> bool:
        """Whether an attention comes that counts sizes."""
        return self.shared.sized and self.number < self.shared.last

    def _breaks(self, samples: int) -> bool:
        """Whether merging splits a compiled graph. By tau the number of tokens depends on data.
        Partitions are made for numbers that are known, so that each would be compiled anew. A
        single one of a single sample stays inside where shapes may depend on data.
        """
        assert self.config is not None
        alone = self.alone and samples == 1
        inside = alone and torch._dynamo.config.capture_dynamic_output_shape_ops
        return self.config.keep is None and not inside

    @torch.compiler.disable
    def _between_graphs(
        self, x: Tensor, normed: Tensor, sizes: Tensor | None, grid: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._merge(x, normed, sizes, grid)

    def _plan(
        self, x: Tensor, normed: Tensor, sizes: Tensor | None, grid: tuple[int, int] | None
    ) -> Plan:
        """The plan for x' [B, L, C] that stand for `sizes`, counted."""
        size, note, config = None, "", self.config
        assert config is not None
        if self._needs_grid:
            h, w = grid or (0, 0)
            known = self.first and self.encoder.grid and h * w == x.shape[1] - self.shared.special
            size = (h, w) if known else None
            note = "" if size else UNKNOWN if self.first else LATER if self._asked else ""
            config = config if size else self._plain
        feature = self._feature(x, normed, config.feature)
        together = config.keep is None and len(feature) > 1
        if together:
            config = as_many(feature, config, size, self.shared.special)
        plan = plan_merge(feature, config, size, self.shared.special)
        if self._counts_calls:
            self._count(
                plan,
                x.shape,
                feature.shape[2] * (1 + together),
                sizes is not None,
                note or self._fewer_merge(plan),
            )
        return plan

    def _fewer_merge(self, plan: Plan) -> str:
        """Why fewer tokens merge than was asked for; empty where as many do."""
        config = self.config
        if torch.compiler.is_compiling() or config is None:
            return ""
        if config.keep is None:
            samples = plan.sizes.shape[0] if plan.sizes.dim() > 1 else 1
            return (
                f"by tau in a batch of {samples}: all keep as many as the one that keeps most"
                if samples > 1
                else ""
            )
        pos = plan.positions
        if round(config.keep * pos.L) >= pos.M:
            return ""
        return f"keep {config.keep:.2f} asked, {pos.M / pos.L:.2f} kept: destinations stay"

    def _count(self, plan: Plan, shape: torch.Size, dim: int, sized: bool, note: str) -> None:
        """Counts a call that merged tokens [B, L, C] by products of `dim` channels in all, and
        summed up their sizes where they have any.
        """
        assert self.counts is not None
        _, tokens, channels = shape
        pairs = plan.positions.blocks * plan.positions.m * plan.positions.n
        products = 0 if isinstance(plan, RowPlan) else 2 if self.shared.restore else 1
        merging = pairs * (dim + channels * products + (sized and not isinstance(plan, RowPlan)))
        self.counts.add(tokens, plan.tokens_kept, merging, note)

    def _feature(self, x: Tensor, normed: Tensor, kind: str) -> Tensor:
        """What similarity compares [B, L, d]: x', the block's keys, or these averaged over the
        heads.
        """
        if kind == "x":
            return x
        width = width_of(self.block, self.encoder)
        keys, self.heard = self.heard, None
        if keys is None:  # attention that does not call its projection
            keys = self._module(self.encoder.keys or "")(normed)
        if keys.shape[-1] != width:  # queries, keys and values joined
            keys = keys[..., width : 2 * width]
        if kind == "k":
            return keys
        return keys.unflatten(-1, (self.heads, -1)).mean(-2)

    @property
    def compares_keys(self) -> bool:
        """Whether its config asks for the keys that its attention computes."""
        return self.shared.active and self.config is not None and self.config.feature != "x"

    @property
    def heads(self) -> int:
        """Of the block's attention."""
        owner = self._module((self.encoder.keys or "").rpartition(".")[0])
        return int(getattr(owner, "num_attention_heads", None) or owner.num_heads)

    def _module(self, path: str) -> Any:
        return self.block.get_submodule(path)
