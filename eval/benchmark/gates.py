"""Check that a benchmark measures what it says, on its first images.

The baseline made again must equal the baseline, and merging's hooks, installed but inactive, must
change nothing; otherwise the difference is the noise floor.

`sensitivity` judges whether an instrument (a model, its prompts and steps) can distinguish methods.
If every merged layer returns its mean over all tokens, attention carries no spatial information. An
instrument whose images hardly change then can't rank methods, because all of them lie between that
and the unmerged image.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from mame_sd.config import MaMeConfig
from mame_sd.runs.jobs import GenerateSettings, Job
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import Merging
from mame_sd.runs.sampling import sample

from ..images import load_image, to_float
from ..metrics.psnr import psnr
from ..results.schema import UNABLE, Gate, MethodResult, Value
from ..scoring.runs import Run

NOISE_FLOOR = 60.0  # dB: a few pixels off by one in 8 bits
LPIPS_FLOOR = 0.10  # of mean attention, at least
QUESTION = "Can this model and these prompts distinguish methods?"


def repeat_gates(
    model: LoadedModel,
    settings: GenerateSettings,
    batches: Sequence[Sequence[Job]],
    baseline: Run,
    config: MaMeConfig,
) -> list[Gate]:
    """Make some batches again, plainly and under inactive hooks, and compare with the files.

    Args:
        model: the model.
        settings: settings of the baseline's images.
        batches: the batches.
        baseline: the baseline's run.
        config: what merges once the hooks are active.

    Returns:
        A gate for each of the two.
    """
    expected = f"PSNR above {NOISE_FLOOR:g} dB (equal images: inf)"
    gates = []
    for name, hooked in (
        ("baseline against itself", False),
        ("inactive merging against the baseline", True),
    ):
        with ExitStack() as stack:
            if hooked:
                handle = Merging(config).install(model).handle
                stack.callback(handle.remove)
                handle.active = False
            again = [np.asarray(one) for batch in batches for one in sample(model, settings, batch)]
        files = [load_image(baseline.items[job.name].path) for batch in batches for job in batch]
        pairs = zip(files, again, strict=True)
        lowest = min(psnr(to_float([a]), to_float([b])).item() for a, b in pairs)
        got = f"{lowest:.4g} dB, lowest of {len(files)}"
        gates.append(Gate(name, expected, got, lowest > NOISE_FLOOR))
    return gates


def sensitivity(rows: Sequence[MethodResult], floor: str) -> str:
    """Say on one line whether the images can distinguish methods, and by which figure.

    Args:
        rows: rows with `lpips`, if measured.
        floor: name of mean attention.
    """
    row = next((row for row in rows if row.name == floor and "lpips" in row.values), None)
    lpips = Value() if row is None else row.values["lpips"]
    if row is None or lpips.mean is None:
        return f"{QUESTION} Not measured: no LPIPS of {floor}."
    verdict = "Yes" if lpips.mean >= LPIPS_FLOOR else UNABLE
    few = lpips.high is None or lpips.high >= LPIPS_FLOOR
    if verdict == UNABLE and few:
        verdict += " with so few prompts; take more (--num)"
    return (
        f"{QUESTION} {verdict}. {row.label} has an LPIPS of {lpips.mean:.4f} (needs"
        f" {LPIPS_FLOOR:.2f})."
    )
