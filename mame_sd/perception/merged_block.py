"""One block of a vision transformer, merged: x' = MSA(LN(x)) + x, x'' = MaMe(x'), MLP(LN(x'')) +
x'' (paper, "Integration for Visual Perception").

A `MergedBlock` replaces its block's forward and runs the block's own modules, whatever tools have
put in their places. So their hooks, their weights and what is saved stay as they are. It
checkpoints where its block would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.paper import Plan
from mame_sd.perception.counts import BlockCounts, weights_of, width_of
from mame_sd.perception.hooks import InnerHook, Merging
from mame_sd.perception.known_encoders import Encoder
from mame_sd.perception.plans import GroupPlan, plan_block
from mame_sd.perception.shared import Forward, ForwardState
from mame_sd.upstream import outside_old_graphs, parameters_of

UNKNOWN = "height and width unknown: destinations are every second token"
Grid = tuple[int, int] | None


def weighted(plan: Plan | GroupPlan, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Merge tokens that stand for several already: means over all that they stand for.

    Args:
        plan: for x.
        x: tokens [B, L, C].
        sizes: how many tokens each stands for [B, L].

    Returns:
        Tokens [B, L', C] in the dtype of x, and their sizes [B, L'].
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    share = sizes.unsqueeze(-1).to(exact)
    held = plan.merge(share)
    y = plan.merge(x.to(exact) * share) / held
    return y.to(x.dtype), held.squeeze(-1).to(sizes.dtype) * plan.sizes


class MergedBlock(Merging):
    """Replaces the forward of one block.

    Args:
        block: the block.
        encoder: what its modules are.
        number: which one it is, counted from 0.
        shared: of all blocks of the model.
        config: how its tokens merge; None: not at all (later blocks still read sizes).
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
        parameters = parameters_of(type(block)).values()
        self._names = [one.name for one in parameters if one.kind != one.VAR_KEYWORD]
        self.config = config
        if config is not None and encoder.keys is not None:
            self.inner = [InnerHook(shared, block, encoder.keys, self.heard)]

    @outside_old_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block's output [B, L', C] of tokens [B, L, C]."""
        shared, block = self.shared, cast(Any, self.block)
        if not shared.active:
            return type(block).forward(block, *args, **kwargs)
        for hook in self.inner:
            hook.follow()
        call = {**dict(zip(self._names, args, strict=False)), **kwargs}
        x = call.pop(self._names[0])
        now = shared.begin() if self.first else shared.now
        masked = call.pop(self.encoder.mask, None) is not None and not now.unmasked
        if masked or call.get("is_causal"):
            raise ValueError(
                "expected images without an attention mask (no padding, one resolution), got one:"
                " merged tokens have no place in it. Leave the mask out, or call remove_mame first"
            )
        run: Any = partial(self._run, **call)
        checkpoints = getattr(block, "gradient_checkpointing", False) and block.training
        if checkpoints and type(block).__call__ is nn.Module.__call__:
            run = partial(block._gradient_checkpointing_func, run)  # before 5.23: around this call
        grid = None if now.again else now.grid
        now.counting = True
        # sizes and the rest as arguments, which checkpoints keep
        y, sizes = run(self._left(x, now), now.sizes, grid, now.sized)
        now.counting = False
        last = self.number == shared.last
        now.sizes = None if last else sizes  # a graph of gradients hangs on them
        dense = shared.dense or now.dense
        if not dense and not (shared.restore and last):
            return y
        whole = shared.restored(y)
        now.whole = None if last else (whole, y)
        if last and not now.dense:
            shared.ended()
        return whole

    def _left(self, x: Tensor, now: Forward) -> Tensor:
        """Return what is left, [B, L', C], of x [B, L, C], which the block before gave whole."""
        if now.whole is None:
            return x
        whole, left = now.whole
        if x is not whole:
            raise RuntimeError(
                f"expected the tokens that block {self.number - 1} gave, whose features are read at"
                " every place, got others: something between the blocks changes them; call"
                " remove_mame first"
            )
        return left

    def _run(self, x: Tensor, sizes: Tensor | None, grid: Grid, sized: bool, **call: Any) -> Any:
        normed = self._module(self.encoder.attention[0])(x)
        x = x + self._attend(normed, sizes, call)
        if self.config is not None:
            # By tau the number of tokens depends on data, and each would be compiled anew.
            apart = torch.compiler.is_compiling() and self.config.keep is None
            merge = self._between_graphs if apart else self._merge
            x, sizes = merge(x, normed, sizes, grid, sized)
        y = x
        for part in self.encoder.mlp:
            y = self._module(part)(y)
        return x + y, sizes

    def _attend(self, normed: Tensor, sizes: Tensor | None, call: dict[str, Any]) -> Tensor:
        """Compute the attention branch after its norm, [B, L, C]."""
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
        self, x: Tensor, normed: Tensor, sizes: Tensor | None, grid: Grid, sized: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Merge x' [B, L, C] into x'' [B, L', C], and count how many tokens each stands for where
        that matters. By tau a source stays where any sample of the batch keeps it (Algorithm 1).

        `grid`: (h, w) of the image's patches.
        """
        config, counts, now = self.config, self.counts, self.shared.now
        assert config is not None
        assert counts is not None
        samples, tokens, _ = x.shape
        prefix, least, note = self.shared.num_prefix_tokens, config.min_tokens or 0, ""
        if tokens - prefix < least:
            if now.counting:
                counts.add(tokens, tokens, 0, f"fewer than min_tokens={least}")
            return x, sizes
        size = None
        if config.keep is None:
            if samples > 1 and not torch.compiler.is_compiling():
                note = f"by tau in a batch of {samples}: a token stays where any image keeps it"
        elif self.first:
            known = self.encoder.grid and grid is not None and math.prod(grid) == tokens - prefix
            size, note = (grid, "") if known else (None, UNKNOWN)
        # Attention may call its projection to keys by no hook: then it is computed again.
        again = self.compared != "x" and self.number not in now.keys
        feature = self._feature(x, normed)
        plan = plan_block(feature, config, size, prefix)
        if now.counting:
            self.shared.keep(self.number, plan)
            cost = self._cost(plan, x.shape[2], feature.shape[2], sizes is not None)
            if again:
                cost += tokens * weights_of(self._module(self.encoder.keys or ""))
            counts.add(tokens, plan.tokens_kept, cost, note)
        if sizes is not None:
            return weighted(plan, x, sizes)
        counted = sized and self.number < self.shared.last
        return plan.merge(x), plan.sizes.expand(samples, -1) if counted else None

    @torch.compiler.disable
    def _between_graphs(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        return self._merge(*args)

    @property
    def compared(self) -> str:
        """What similarity compares: with `keep` the keys, where the model's are known."""
        if self.config is None:
            return "x"
        if self.config.keep is None:
            return self.config.feature
        return "k" if self.encoder.keys else "x"

    def _cost(self, plan: Plan | GroupPlan, channels: int, dim: int, sized: bool) -> int:
        """Reckon the multiply-adds of merging one image by products of `dim` channels."""
        if isinstance(plan, GroupPlan):  # compared, and means by a matrix of ones
            pairs, products = plan.found.cells.kept * plan.found.tokens_in, channels
        else:
            pairs = plan.dst.shape[0] * plan.src.shape[0]
            products = (1 + self.shared.restore) * channels
        return pairs * (dim + products + sized)

    def heard(self, path: str, keys: Tensor) -> None:
        """Keep what the projection to keys gives [B, L, d], where the block will compare it."""
        if self.shared.active and self.compared != "x":
            self.shared.now.keys[self.number] = keys

    def _feature(self, x: Tensor, normed: Tensor) -> Tensor:
        """Return what similarity compares, [B, L, d]: x', keys, or keys averaged over heads."""
        if self.compared == "x":
            return x
        keys = self.shared.now.keys.pop(self.number, None)
        if keys is None:
            keys = self._module(self.encoder.keys or "")(normed)
        if self.encoder.joined:
            width = width_of(self.block, self.encoder)
            keys = keys[..., width : 2 * width]
        return keys if self.compared == "k" else keys.unflatten(-1, (self.heads, -1)).mean(-2)

    @property
    def heads(self) -> int:
        """Of the block's attention."""
        owner = self._module((self.encoder.keys or "").rpartition(".")[0])
        return int(getattr(owner, "num_attention_heads", None) or owner.num_heads)

    def _module(self, path: str) -> Any:
        return self.block.get_submodule(path)
