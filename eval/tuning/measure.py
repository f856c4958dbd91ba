"""Measure the settings of a ladder: what each costs in LPIPS to the unmerged image, and what it gains in speed.

Every prompt is a round of interleaved timing: an image without merging and one with each setting, from the same noise.
Speed is that of the whole pipeline.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mame_sd.config import MaMeConfig
from mame_sd.runs.files import check_place, write_atomically
from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, Job, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt
from mame_sd.runs.sampling import levels_of, merge_in, sample

from ..images import to_float
from ..metrics.lpips import load_lpips
from ..timing import interleaved, quartiles, timed

BASELINE = "baseline"
MEASURED = "measured.json"
Distance = Callable[[Image.Image, Image.Image], float]
Rows = dict[str, dict[str, dict[str, float]]]  # seconds, lpips and kept, by image and setting


@dataclass(frozen=True)
class Trial:
    """One setting: means over the prompts of LPIPS, medians of seconds an image and of times faster than unmerged."""

    label: str
    config: MaMeConfig
    seconds: float
    times_faster: float
    lpips: float
    kept: float  # share of the tokens (keys, for kv) that the layers of the level with the most tokens keep


def lpips_distance(weights_dir: Path | None = None, offline: bool = False) -> Distance:
    """LPIPS of two images. Raises UserError when the weights can't be had: it says what to do."""
    measure = load_lpips(weights_dir=weights_dir, offline=offline)
    return lambda a, b: float(measure(to_float([np.asarray(a)]), to_float([np.asarray(b)])))


def tune(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    ladder: Sequence[tuple[str, MaMeConfig]],
    distance: Distance,
    out: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """Measure every setting of `ladder`. What is done stands in `out`/measured.json, and the same call continues.

    Raises:
        UserError: a setting with which nothing could merge, or that the model refuses.
        MachineError: the disk, memory.
    """
    check_place(out, out)
    jobs = jobs_of(prompts, settings)
    about = _digest([asdict(settings), [asdict(job) for job in jobs], [(n, c.to_dict()) for n, c in ladder]], model)
    rows = _read(out / MEASURED, about)
    configs: dict[str, MaMeConfig | None] = {BASELINE: None, **dict(ladder)}
    rounds = interleaved(
        list(configs),
        len(jobs),
        lambda label, number: _generated(model, settings, jobs[number], configs[label]),
        done={number for number, job in enumerate(jobs) if job.name in rows},
        warm_up=lambda label: _generated(model, replace(settings, steps=1), jobs[0], configs[label]),
        on_progress=on_progress,
    )
    for number, made in rounds:
        plain = made[BASELINE][0]
        rows[jobs[number].name] = {
            label: {"seconds": seconds, "lpips": distance(image, plain), "kept": kept}
            for label, (image, seconds, kept) in made.items()
        }
        write_atomically(out / MEASURED, json.dumps({"about": about, "rows": rows}).encode())
    return [_trial(label, config, [rows[job.name] for job in jobs]) for label, config in ladder]


def _generated(
    model: LoadedModel, settings: GenerateSettings, job: Job, config: MaMeConfig | None
) -> tuple[Image.Image, float, float]:
    """The job's image, its seconds, and the share of the tokens that the level with the most tokens keeps."""
    handle = None if config is None else merge_in(model, config)
    try:
        (image,), seconds = timed(lambda: sample(model, settings, [job]), model.pipe.device)
        return image, seconds, 1.0 if handle is None else _kept(levels_of(handle))
    finally:
        if handle is not None:
            handle.remove()


def _trial(label: str, config: MaMeConfig, rows: Sequence[dict[str, dict[str, float]]]) -> Trial:
    return Trial(
        label=label,
        config=config,
        seconds=quartiles([row[label]["seconds"] for row in rows])[1],
        times_faster=quartiles([row[BASELINE]["seconds"] / row[label]["seconds"] for row in rows])[1],
        lpips=float(np.mean([row[label]["lpips"] for row in rows])),
        kept=float(np.mean([row[label]["kept"] for row in rows])),
    )


def _kept(levels: Sequence[dict[str, Any]]) -> float:
    return float(levels[0]["tokens_kept"] / levels[0]["tokens_in"])


def _digest(settings: list[Any], model: LoadedModel) -> str:
    about = json.dumps([settings, model.identity, environment(model)], sort_keys=True, default=str)
    return hashlib.sha256(about.encode()).hexdigest()


def _read(path: Path, about: str) -> Rows:
    """Rows of an earlier call with the same settings on the same machine; none otherwise."""
    try:
        found = json.loads(path.read_bytes())
        return dict(found["rows"]) if found["about"] == about else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
