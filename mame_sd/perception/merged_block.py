"""Run one merged block of a vision transformer.

The paper (arXiv 2604.13432, "Integration for Visual Perception") writes it as
x' = MSA(LN(x)) + x, x'' = MaMe(x'), y = MLP(LN(x'')) + x''

A `MergedBlock` replaces its block's forward and calls the block's own modules, including those that
other tools have put there. So their hooks, weights and checkpoints on disk stay as they are.
Gradient checkpointing happens where the block would do it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mame_sd.compat import outside_old_graphs, parameters_of
from mame_sd.config import MaMeConfig
from mame_sd.core.paper import Plan
from mame_sd.perception.encoder_registry import Encoder
from mame_sd.perception.forward_state import Forward, ForwardState
from mame_sd.perception.hooks import HookOwner, InnerHook
from mame_sd.perception.plans import GroupPlan, plan_block
from mame_sd.perception.report import BlockCounts, weights_of, width_of

MIN_TOKENS = 2  # blocks with fewer patches don't merge
UNKNOWN = "height and width unknown: destinations are every second token"
Grid = tuple[int, int] | None


def merge_weighted(plan: Plan | GroupPlan, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Merge tokens that already stand for several, as means weighted by size.

    Args:
        plan: the plan for x.
        x: tokens [B, L, C].
        sizes: number of tokens that each one stands for, [B, L].

    Returns:
        Tokens [B, L', C] in the dtype of x, and their sizes [B, L'].
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    share = sizes.unsqueeze(-1).to(exact)
    held = plan.merge(share)
    y = plan.merge(x.to(exact) * share) / held
    return y.to(x.dtype), held.squeeze(-1).to(sizes.dtype) * plan.sizes


class MergedBlock(HookOwner):
    """Replace the forward of one block.

    Args:
        block: the block.
        spec: the description of its modules.
        number: its index.
        shared: the state that all blocks of the model share.
        config: settings of its merging. If None, it doesn't merge but still reads sizes.
        counts: counters of the merging blocks by index. In the first of these blocks the tokens are
            the image's patches in row-major order.
    """

    def __init__(
        self,
        block: nn.Module,
        spec: Encoder,
        number: int,
        shared: ForwardState,
        config: MaMeConfig | None,
        counts: Mapping[int, BlockCounts],
    ) -> None:
        self.block = block
        self.spec = spec
        self.number = number
        self.shared = shared
        self.counts = counts.get(number)
        self.first = number == min(counts)
        parameters = parameters_of(type(block)).values()
        self._names = [one.name for one in parameters if one.kind != one.VAR_KEYWORD]
        self.config = config
        if config is not None and spec.keys is not None:
            self.inner = [InnerHook(shared, block, spec.keys, self.keep_keys)]

    @outside_old_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block's output [B, L', C] from tokens [B, L, C]."""
        shared, block = self.shared, cast(Any, self.block)
        if not shared.active:
            return type(block).forward(block, *args, **kwargs)
        for hook in self.inner:
            hook.follow()
        call = {**dict(zip(self._names, args, strict=False)), **kwargs}
        x = call.pop(self._names[0])
        now = shared.begin() if self.first else shared.now
        masked = call.pop(self.spec.mask, None) is not None and not now.unmasked
        if masked or call.get("is_causal"):
            raise ValueError(
                "expected images without an attention mask (no padding, one resolution), got one:"
                " merged tokens have no place in it. Leave the mask out, or call remove_mame first"
            )
        run: Any = partial(self._run, **call)
        checkpoints = getattr(block, "gradient_checkpointing", False) and block.training
        if checkpoints and type(block).__call__ is nn.Module.__call__:
            run = partial(block._gradient_checkpointing_func, run)  # before 5.23: around this call
        now.counting = True
        # Passed as arguments, because checkpoints keep these.
        y, sizes = run(self._merged_input(x, now), now.sizes, now.grid, now.sized)
        now.counting = False
        last = self.number == shared.last
        now.sizes = None if last else sizes  # they hold a graph of gradients
        dense = shared.dense or now.dense
        if not dense and not (shared.restore and last):
            return y
        whole = shared.restored(y)
        now.whole = None if last else (whole, y)
        if last and not now.dense:
            shared.drop_plans()
        return whole

    def _merged_input(self, x: Tensor, now: Forward) -> Tensor:
        """Return the merged tokens [B, L', C] whose restored form x the previous block returned."""
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
        normed = self._module(self.spec.attention[0])(x)
        x = x + self._attend(normed, sizes, call)
        if self.config is not None:
            # With tau the number of tokens depends on data, and each number would be compiled.
            apart = torch.compiler.is_compiling() and self.config.keep is None
            merge = self._between_graphs if apart else self._merge
            x, sizes = merge(x, normed, sizes, grid, sized)
        y = x
        for part in self.spec.mlp:
            y = self._module(part)(y)
        return x + y, sizes

    def _attend(self, normed: Tensor, sizes: Tensor | None, call: dict[str, Any]) -> Tensor:
        """Compute the attention branch after its norm, [B, L, C]."""
        attention, *rest = self.spec.attention[1:]
        # [B, 1, 1, L]
        mask = None if sizes is None else sizes.log().to(normed.dtype)[:, None, None]
        if mask is not None and self.spec.attend is not None:
            y = self.spec.attend(self._module(attention), normed, mask)
        else:
            y = self._module(attention)(
                normed, **(call if mask is None else {**call, self.spec.mask: mask})
            )
        y = y[0] if isinstance(y, tuple) else y
        for part in rest:
            y = self._module(part)(y)
        return y

    def _merge(
        self, x: Tensor, normed: Tensor, sizes: Tensor | None, grid: Grid, sized: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Merge x' [B, L, C] of sizes [B, L] into x'' [B, L', C], with its sizes, and count it.

        `normed` is the attention's input, `sized` True if later blocks need sizes. With `tau` a
        source token stays if any sample of the batch preserves it (Algorithm 1).
        """
        config, counts, now = self.config, self.counts, self.shared.now
        assert config is not None
        assert counts is not None
        samples, tokens, _ = x.shape
        prefix, size, note = self.shared.num_prefix_tokens, None, ""
        if tokens - prefix < MIN_TOKENS:
            if now.counting:
                counts.count_call(tokens, tokens, 0, f"fewer than {MIN_TOKENS} patches")
            return x, sizes
        if config.keep is None:
            if samples > 1 and not torch.compiler.is_compiling():
                note = f"by tau in a batch of {samples}: a token stays where any image keeps it"
        elif self.first:
            on_grid = self.spec.grid and grid is not None and math.prod(grid) == tokens - prefix
            size, note = (grid, "") if on_grid else (None, UNKNOWN)
        # If attention calls its projection to keys without hooks, keys are computed again.
        again = self.compares_keys and self.number not in now.keys
        feature = self._feature(x, normed)
        plan = self._plan(feature, size)
        if now.counting:
            self.shared.keep(self.number, plan)
            cost = self._cost(plan, x.shape[2], feature.shape[2], sizes is not None)
            if again:
                cost += tokens * weights_of(self._module(self.spec.keys or ""))
            counts.count_call(tokens, plan.tokens_kept, cost, note)
        if sizes is not None:
            return merge_weighted(plan, x, sizes)
        sized = sized and self.number < self.shared.last
        return plan.merge(x), plan.sizes.expand(samples, -1) if sized else None

    @torch.compiler.disable
    def _between_graphs(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        return self._merge(*args)

    @property
    def compares_keys(self) -> bool:
        """Return True if similarity compares keys: with `keep`, if the registry knows them."""
        return self.config is not None and self.config.keep is not None and bool(self.spec.keys)

    def _plan(self, feature: Tensor, size: Grid) -> Plan | GroupPlan:
        assert self.config is not None
        return plan_block(feature, self.config, size, self.shared.num_prefix_tokens)

    def _cost(self, plan: Plan | GroupPlan, channels: int, dim: int, sized: bool) -> int:
        """Count the multiply-adds of merging one image's tokens by `dim` compared features."""
        if isinstance(plan, GroupPlan):  # one product to compare, one for the means
            pairs, products = plan.body.cells.kept * plan.body.tokens_in, channels
        else:
            pairs = plan.dst.shape[0] * plan.src.shape[0]
            products = (1 + self.shared.restore) * channels
        return pairs * (dim + products + sized)

    def keep_keys(self, keys: Tensor) -> None:
        """Keep the keys [B, L, d] that a projection returned, if this block will compare them."""
        if self.shared.active and self.compares_keys:
            self.shared.now.keys[self.number] = keys

    def _feature(self, x: Tensor, normed: Tensor) -> Tensor:
        """Return what similarity compares, [B, L, d]: keys, or x'."""
        if not self.compares_keys:
            return x
        keys = self.shared.now.keys.pop(self.number, None)
        if keys is None:
            keys = self._module(self.spec.keys or "")(normed)
        if self.spec.joined:
            width = width_of(self.block, self.spec)
            keys = keys[..., width : 2 * width]
        return cast(Tensor, keys)

    def _module(self, path: str) -> Any:
        return self.block.get_submodule(path)
