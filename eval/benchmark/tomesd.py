"""tomesd, the rival that merging is compared with, as a method that a run installs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mame_sd.errors import UserError
from mame_sd.runs.jobs import Job, generator_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.methods import InstalledMethod, NotApplicable

NO_TOMESD = "tomesd is not installed: pip install 'mame-sd[rivals]'"


def has_tomesd() -> bool:
    return importlib.util.find_spec("tomesd") is not None


@contextmanager
def tomesd_on(unet: nn.Module, ratio: float) -> Iterator[None]:
    """`unet` patched by the tomesd package for the block; `ratio` of the tokens merge.

    Raises ImportError where tomesd is not installed.
    """
    import tomesd

    try:
        tomesd.apply_patch(unet, ratio=ratio)
        torch.manual_seed(0)  # its generator is forked from the global one at the first forward
        yield
    finally:
        tomesd.remove_patch(unet)


@dataclass(frozen=True)
class ToMeSD:
    """Token Merging for Stable Diffusion (Bolya and Hoffman, 2023) as its package applies it,
    `ratio` of tokens merged.
    """

    ratio: float

    def describe(self) -> dict[str, Any]:
        version = importlib.metadata.version("tomesd") if has_tomesd() else None
        return {"rival": {"name": "tomesd", "ratio": self.ratio, "version": version}}

    def install(self, model: LoadedModel) -> InstalledMethod:
        """Raises UserError when tomesd is missing, NotApplicable when the model has no UNet."""
        if not has_tomesd():
            raise UserError(f"tomesd: expected its package, but {NO_TOMESD}")
        unet = getattr(model.pipe, "unet", None)
        if not isinstance(unet, nn.Module):
            raise NotApplicable(
                f"tomesd: expected a model with a unet, got {type(model.pipe).__name__};"
                " choose another model"
            )
        import tomesd

        tomesd.apply_patch(unet, ratio=self.ratio)
        return _InstalledToMeSD(unet)


@dataclass
class _Seen:
    """Tokens of one transformer block: as they come in, and as its self-attention gets them, summed
    over calls.
    """

    calls: int = 0
    tokens_in: int = 0
    kept: int = 0


@dataclass
class _InstalledToMeSD:
    """tomesd on a UNet.

    Its random numbers are drawn anew for each batch, so that resuming changes no pixel.
    """

    unet: nn.Module
    blocks: list[_Seen] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for module in self.unet.modules():
            if type(module).__name__ == "ToMeBlock":
                self._watch(module)

    def _watch(self, block: nn.Module) -> None:
        seen = _Seen()

        def count_in(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.calls += 1
            seen.tokens_in += (args[0] if args else kwargs["hidden_states"]).shape[1]

        def count_kept(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.kept += (args[0] if args else kwargs["hidden_states"]).shape[1]

        self.blocks.append(seen)
        self.hooks.append(block.register_forward_pre_hook(count_in, with_kwargs=True))
        self.hooks.append(block.attn1.register_forward_pre_hook(count_kept, with_kwargs=True))  # type: ignore[union-attr]

    def begin(self, jobs: Sequence[Job]) -> None:
        device = next(self.unet.parameters()).device
        seed = generator_of(jobs[0]).initial_seed()
        info: Any = self.unet._tome_info
        info["args"]["generator"] = torch.Generator(device).manual_seed(seed)
        for seen in self.blocks:
            seen.calls = seen.tokens_in = seen.kept = 0

    def levels(self) -> list[dict[str, Any]]:
        """Raises NotApplicable when no block merged anything, which tomesd itself passes over in
        silence (SDXL).
        """
        called = [seen for seen in self.blocks if seen.calls]
        if called and all(seen.kept == seen.tokens_in for seen in called):
            raise NotApplicable(
                "tomesd: expected at least one layer to merge, but it merges only at the"
                " largest level, which has no self-attention in this model; choose another method"
            )
        found = []
        for number, tokens in enumerate(
            sorted({seen.tokens_in / seen.calls for seen in called}, reverse=True)
        ):
            group = [seen for seen in called if seen.tokens_in / seen.calls == tokens]
            calls = sum(seen.calls for seen in group)
            merged = sum(seen.kept < seen.tokens_in for seen in group)
            kept = sum(seen.kept for seen in group) / calls
            level = {"level": number, "tokens_in": tokens, "tokens_kept": kept}
            found.append({**level, "layers": len(group), "layers_merged": merged})
        return found

    def remove(self) -> None:
        import tomesd

        for hook in self.hooks:
            hook.remove()
        tomesd.remove_patch(self.unet)
        for module in self.unet.modules():
            if hasattr(module, "_tome_info"):
                del module._tome_info
