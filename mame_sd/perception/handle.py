"""Control merging in one vision transformer: settings, counters, restoring and removal."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from mame_sd.attach import check_free
from mame_sd.config import MaMeConfig, read_config
from mame_sd.core.paper import Plan
from mame_sd.handle import Handle
from mame_sd.perception.encoder_registry import Encoder, find_encoder, takes_mean
from mame_sd.perception.forward_state import FeatureMaps, ForwardState, no_sizes
from mame_sd.perception.hooks import Placed, is_ours, observed_by, ours_on, put, take, take_all
from mame_sd.perception.merged_block import MergedBlock
from mame_sd.perception.plans import GroupPlan
from mame_sd.perception.report import (
    BlockCounts,
    EncoderReport,
    around_blocks,
    block_reports,
)
from mame_sd.perception.settings import FIRST, changed, chosen_blocks, configs_of, is_paper
from mame_sd.report import device_of


class EncoderHandle(Handle[dict[int, MaMeConfig]]):
    """Merging as applied to one vision transformer, made by `apply_encoder`.

    Attributes:
        root: the module that merging was applied to.
        encoder: the vision transformer in it.
    """

    def __init__(
        self,
        root: nn.Module,
        config: MaMeConfig | None,
        blocks: Any,
        fields: dict[str, Any],
        restore: bool | None,
        prop_attn: bool | None,
        make_block: Callable[..., MergedBlock] = MergedBlock,
    ) -> None:
        self.root, config = root, read_config(config)
        for name, value in (("restore", restore), ("prop_attn", prop_attn)):
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name}: expected True, False or None, got {value!r}")
        self.encoder, modules, spec = find_encoder(root)
        names = {module: name for name, module in root.named_modules()}
        self._blocks = {names[block]: block for block in modules}
        self._paper = is_paper(config, fields)
        chosen = chosen_blocks(blocks, len(modules), 0 if self._paper else FIRST)
        self._settings = configs_of(config, fields, chosen)
        if restore is False and spec.dense:
            raise ValueError(
                f"restore: expected True for {type(self.encoder).__name__}, whose heads read every"
                " token, got False; leave it out"
            )
        if restore is None:
            restore = takes_mean(root) and not self._paper
        if prop_attn is None and (
            self._paper or not (spec.adds_mask and _has_mask(spec, modules[0]))
        ):
            prop_attn = False
        if prop_attn and not _has_mask(spec, modules[0]):
            attention = type(modules[0].get_submodule(spec.attention[1])).__name__
            raise ValueError(
                f"prop_attn: expected attention that takes an argument {spec.mask!r}, which"
                f" {attention} does not; leave it out, or update the library that the model is of"
            )
        self._shared = ForwardState(self.encoder, spec, modules, restore, prop_attn)
        device = device_of(self.encoder)
        self._counts = {number: BlockCounts(device) for number in chosen}
        self._merged = {
            number: make_block(
                modules[number], spec, number, self._shared, self.configs.get(number), self._counts
            )
            for number in range(chosen[0], len(modules))
        }
        owners = [self._shared, *self._merged.values()]
        self._inner = [hook for one in owners for hook in one.inner]
        self._placed = self._place()

    def _place(self) -> list[Placed]:
        """List every method that merging puts on a module, and where."""
        shared, encoder, blocks = self._shared, self.encoder, self._merged.values()
        placed: list[Placed] = [(encoder, "before", shared.before), (encoder, "end", shared.end)]
        placed += [(one.block, "forward", one.forward) for one in blocks]
        for hook in shared.inner:  # parts may be called without the model (timm's forward_features)
            parent = encoder.get_submodule(hook.path.rpartition(".")[0])
            placed.append((parent, "before", hook.follow))
        maps = shared.spec.maps
        return placed + [(encoder, name, FeatureMaps(shared, name).call) for name in maps]

    @property
    def configs(self) -> dict[int, MaMeConfig]:
        """Return the current settings by block index; `set` changes them."""
        return dict(self._settings)

    @property
    def config(self) -> MaMeConfig:
        """Return the settings of the first merging block; `configs` has those of every block."""
        return next(iter(self.configs.values()))

    @property
    def prop_attn(self) -> bool:
        """Return True if attention currently adds the log of token sizes to its logits."""
        return self._shared.prop_attn is not False and not no_sizes(self.encoder)

    @property
    def installed(self) -> bool:
        """Return True if this handle's merging is on the model: neither removed nor replaced."""
        return all(one in ours_on(one[0]) for one in self._placed)

    def _switch(self, active: bool) -> None:
        super()._switch(active)
        self._shared.active = active

    def _check_change(self, what: str) -> None:
        super()._check_change(what)
        self._shared.check_idle(what)

    def _resolve(self, config: MaMeConfig | None, fields: dict[str, Any]) -> dict[int, MaMeConfig]:
        paper = is_paper(config, fields)
        if paper > self._paper or (config and paper != self._paper):
            raise ValueError(
                "tau: expected the method that merging was applied with (the paper's by tau, ours"
                " by keep), got the other; call apply_mame again"
            )
        if config is None:
            return changed(self.configs, fields)
        return configs_of(config, fields, self.configs)

    def _use(self, settings: dict[int, MaMeConfig]) -> None:
        super()._use(settings)
        for number, config in settings.items():
            self._merged[number].config = config

    def report(self) -> EncoderReport:
        """Return tokens and FLOPs of every block since the last `reset`, as means over forwards."""
        blocks, calls = block_reports(self._blocks, self._shared.spec, self._counts)
        before, after = blocks[0].tokens_in, blocks[-1].tokens_kept
        whole = sum(block.flops_before for block in blocks)
        left = sum(block.flops for block in blocks)
        if calls:
            shared, blocks_alone = self._shared, [*self._blocks.values()]
            around = partial(around_blocks, self.encoder, blocks_alone, shared.patches, before)
            whole += around(before)
            left += around(before if shared.restore or shared.dense else after)
        return EncoderReport(blocks, calls, whole, left, self.prop_attn)

    def reset(self) -> None:
        """Set all counters to zero and drop captured plans."""
        for count in self._counts.values():
            count.reset(device_of(self.encoder))
        self._shared.now.plans = {}

    def capture(self, on: bool = True) -> None:
        """Keep the plans of this thread's latest forward for `plans`.

        This needs memory for one plan per block and does not work under torch.compile.
        """
        self._shared.capture = on
        if not on:
            self._shared.now.plans = {}

    def plans(self) -> dict[int, Plan | GroupPlan]:
        """Return the plans of the latest forward since `capture`, by block index in order.

        Their `restore`, from the last block to the first, gives a hidden state all of its tokens
        (MaRe).
        """
        return dict(self._shared.now.plans)

    @property
    def num_prefix_tokens(self) -> int:
        """Return the number of tokens before the patches."""
        return self._shared.num_prefix_tokens

    def remove(self) -> None:
        """Remove this handle's merging from the model; merging applied later stays."""
        self._shared.check_idle("remove")
        ours = {*self._inner, *(method.__self__ for _, _, method in self._placed)}
        parts = (module for module, _, _ in self._placed)  # whether or not tools took them out
        for module in {*self.encoder.modules(), *parts, *observed_by(ours)}:
            take(module, ours)

    def install(self) -> None:
        """Put merging back after `remove`, or replace merging that was applied later.

        Raises:
            ValueError: another tool has replaced a block's forward.
        """
        for one in self._merged.values():
            check_free(one.block, "forward", is_ours)
        take_all(self.root, "apply_mame")
        for placed in self._placed:
            put(*placed)
        for inner in self._inner:
            inner.place()


def _has_mask(spec: Encoder, block: nn.Module) -> bool:
    """Return True if the attention of `block` accepts a mask, or if we compute it with one."""
    attention = type(block.get_submodule(spec.attention[1]))
    return spec.attend is not None or spec.mask in inspect.signature(attention.forward).parameters
