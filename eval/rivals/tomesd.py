"""Install tomesd, the rival that merging is compared with, on a run's model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn

from mame_sd.errors import UserError
from mame_sd.runs.jobs import Job, generator_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import InstalledMethod, NotApplicable

NO_TOMESD = "tomesd is not installed: pip install 'mame-sd[rivals]'"


def has_tomesd() -> bool:
    """Return True if the package is installed."""
    return importlib.util.find_spec("tomesd") is not None


@contextmanager
def tomesd_on(unet: nn.Module, ratio: float) -> Iterator[None]:
    """Patch `unet` by the package tomesd for a `with` block; `ratio` of the tokens merge.

    Raises ImportError if tomesd isn't installed.
    """
    import tomesd

    try:
        tomesd.apply_patch(unet, ratio=ratio)
        yield
    finally:
        tomesd.remove_patch(unet)
        for module in unet.modules():
            if hasattr(module, "_tome_info"):
                del module._tome_info


@dataclass(frozen=True)
class ToMeSD:
    """Token Merging for Stable Diffusion (Bolya and Hoffman, 2023) as its package applies it.

    Attributes:
        ratio: share of the tokens that merge.
    """

    ratio: float

    def describe(self) -> dict[str, Any]:
        """Return its settings as JSON values."""
        version = importlib.metadata.version("tomesd") if has_tomesd() else None
        return {"rival": {"name": "tomesd", "ratio": self.ratio, "version": version}}

    def install(self, model: LoadedModel) -> InstalledMethod:
        """Put it on a model.

        Raises UserError if tomesd is missing, NotApplicable if the model has no UNet.
        """
        if not has_tomesd():
            raise UserError(f"tomesd: expected its package, but {NO_TOMESD}")
        unet = getattr(model.pipe, "unet", None)
        if not isinstance(unet, nn.Module):
            raise NotApplicable(
                f"tomesd: expected a model with a unet, got {type(model.pipe).__name__};"
                " choose another model"
            )
        return _InstalledToMeSD(unet, self.ratio)


class _InstalledToMeSD:
    """tomesd on a UNet. It draws anew for each batch, so that resuming changes no pixel."""

    def __init__(self, unet: nn.Module, ratio: float) -> None:
        self._unet, self._on = unet, ExitStack()
        self._on.enter_context(tomesd_on(unet, ratio))
        # of each block: tokens in each call, as they come in and as its self-attention gets them
        self._seen: list[tuple[list[int], list[int]]] = [
            (self._counted(module), self._counted(module.get_submodule("attn1")))
            for module in unet.modules()
            if type(module).__name__ == "ToMeBlock"
        ]

    def _counted(self, module: nn.Module) -> list[int]:
        """Return a list that takes the number of tokens in each call of `module`."""
        counts: list[int] = []

        def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            counts.append((args[0] if args else kwargs["hidden_states"]).shape[1])

        self._on.callback(module.register_forward_pre_hook(count, with_kwargs=True).remove)
        return counts

    def begin(self, jobs: Sequence[Job]) -> None:
        """Draw from a seed of the batch's jobs, and count anew."""
        device = next(self._unet.parameters()).device
        seed = generator_of(jobs[0]).initial_seed()
        info: Any = self._unet._tome_info
        info["args"]["generator"] = torch.Generator(device).manual_seed(seed)
        for came, kept in self._seen:
            came.clear()
            kept.clear()

    def levels(self) -> list[dict[str, Any]]:
        """Return the levels that merged.

        Raises NotApplicable if no block merged anything, which tomesd doesn't report (SDXL).
        """
        means = [(fmean(came), fmean(kept)) for came, kept in self._seen if came]
        if means and all(came == kept for came, kept in means):
            raise NotApplicable(
                "tomesd: expected at least one layer to merge, but it merges only at the"
                " largest level, which has no self-attention in this model; choose another method"
            )
        levels = []
        for number, tokens in enumerate(sorted({came for came, _ in means}, reverse=True)):
            group = [kept for came, kept in means if came == tokens]
            level = {"level": number, "tokens_in": tokens, "tokens_kept": fmean(group)}
            merged = sum(kept < tokens for kept in group)
            levels.append({**level, "layers": len(group), "layers_merged": merged})
        return levels

    def remove(self) -> None:
        """Take it off the model."""
        self._on.close()
