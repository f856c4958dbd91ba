"""Option groups of ``mame-sd-eval`` beside those of ``mame-sd``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mame_sd.cli.options import MergingOptions, option
from mame_sd.errors import UserError

METHODS = ("baseline", "mame", "tomesd")
DEFAULT_RATIO = 0.5
CLIP_HELP = (
    "CLIP to score with: clip-vit-b-32, clip-vit-l-14, or a folder that transformers saved. Without it, the first."
)


class MethodOptions(MergingOptions):
    """--method, --ratio and merging's options. `build` gives what `mame_sd.runs.generate.generate` takes."""

    def parameters(self) -> list[inspect.Parameter]:
        method = typer.Option(
            help="What to run: the unchanged model, merging, or tomesd (extra peers).",
            metavar="|".join(METHODS),
            rich_help_panel="Method",
        )
        ratio = typer.Option(
            help=f"Share of tokens that tomesd merges. Without it, {DEFAULT_RATIO}.", rich_help_panel="Method"
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        return [
            inspect.Parameter("method", kind, default="mame", annotation=Annotated[str, method]),
            inspect.Parameter("ratio", kind, default=None, annotation=Annotated[float | None, ratio]),
            *super().parameters(),
        ]

    def build(self, values: Mapping[str, Any]) -> Any:
        """None for the baseline, a MaMeConfig, or a patch. Raises UserError for options that do not fit the method."""
        method, ratio = values["method"], values["ratio"]
        rest = {name: value for name, value in values.items() if name not in ("method", "ratio")}
        if method not in METHODS:
            raise UserError(f"--method: expected one of {', '.join(METHODS)}, got {method!r}; give one of these")
        unused = [] if method == "mame" else self.given(rest)
        unused += ["--ratio"] if ratio is not None and method != "tomesd" else []
        if unused:
            raise UserError(f"--method {method}: expected no {', '.join(unused)} beside it; drop one of them")
        if method == "tomesd":
            from ..benchmark.methods import ToMeSD

            return ToMeSD(DEFAULT_RATIO if ratio is None else ratio)
        return super().build(rest) if method == "mame" else None


@dataclass(frozen=True, kw_only=True)
class SuiteSampling:
    """What of a suite's sampling is replaced; None: as the suite has it."""

    steps: int | None = option(None, "Denoising steps, instead of the suite's.")
    guidance: float | None = option(None, "Guidance scale, instead of the suite's.")
    seed: int | None = option(None, "Seed of the run, instead of the suite's.")
    height: int | None = option(None, "Height in pixels, instead of the suite's.")
    width: int | None = option(None, "Width in pixels, instead of the suite's.")
    batch_size: int | None = option(None, "Images computed together. Without it, 1.")


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """What metrics are computed with."""

    weights_dir: str | None = option(None, "Folder with weights of metrics, looked into first.", metavar="DIR")
    offline: bool = option(False, "Never ask a network.", "--offline")
    clip: str | None = option(None, CLIP_HELP, metavar="NAME|DIR")
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto: the fastest there is.")
    cache: str | None = option(
        None, "Folder that keeps features of images. Without it, features in the weights' own folder.", metavar="DIR"
    )
