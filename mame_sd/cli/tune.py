"""Find the setting for one's own model, size and machine: a ladder of settings from mild to strong, measured and chosen.

Every prompt is painted without merging and then with each setting, from the same noise, so that a slow minute of the
machine falls on all of them. Distance is LPIPS to the unmerged image; speed is that of the whole pipeline.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, Job, plan_jobs
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt
from mame_sd.runs.run_folder import write_atomically, writing
from mame_sd.runs.sampling import levels_of, merge_in, sample

BASELINE = "baseline"
# From mild to strong. The cell follows from keep, and merge is the preset's; what else is not named is as in the setting that
# tuning starts from.
LADDER: tuple[dict[str, Any], ...] = (
    {"keep": 0.75},
    {"keep": 0.5},
    {"keep": 0.375},
    {"keep": 0.25},
    {"keep": 0.19},
    {"keep": 0.125},
    {"keep": 0.0625},
    {"keep": 0.5, "merge": "qkv"},
    {"keep": 0.25, "merge": "qkv"},
)
Distance = Callable[[Image.Image, Image.Image], float]


@dataclass(frozen=True)
class Trial:
    """One setting: means over the prompts of LPIPS, medians of seconds an image and of times faster than unmerged."""

    label: str
    config: MaMeConfig
    seconds: float
    times_faster: float
    lpips: float
    kept: float  # share of the tokens (keys, for kv) that the layers of the level with the most tokens keep


def ladder_of(base: MaMeConfig) -> list[tuple[str, MaMeConfig]]:
    """The ladder's settings over `base`, labelled by what they change. Raises UserError where `base` allows no keep."""
    steps = []
    for fields in LADDER:
        label = ", ".join(f"{name} {_short(value)}" for name, value in fields.items())
        try:
            steps.append((label, base.replace(**{"stride": None, "merge": None, **fields})))
        except ValueError as error:
            raise UserError(f"merging: {error}; tune tries shares to keep") from error
    return steps


def lpips_distance(weights_dir: Path | None = None, offline: bool = False) -> Distance:
    """LPIPS of two images. The one place where the library reaches for its evaluation, and only when it is asked to.

    Raises UserError when the weights can't be had: it says what to do.
    """
    measure = import_module("mame_sd.eval.metrics.lpips").load_lpips(weights_dir=weights_dir, offline=offline)

    def tensor(image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float() / 255

    return lambda a, b: float(measure(tensor(a), tensor(b)))


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
    jobs = plan_jobs(prompts, settings)
    about = _digest([asdict(settings), [asdict(job) for job in jobs], [(n, c.to_dict()) for n, c in ladder]], model)
    record = _read(out / "measured.json", about)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    variants: list[tuple[str, MaMeConfig | None]] = [(BASELINE, None), *ladder]
    total = len(jobs) * len(variants)
    on_progress(len(record) * len(variants), total)
    todo = [(number, job) for number, job in enumerate(jobs) if job.name not in record]
    for _, config in variants if todo else ():
        _paint(model, GenerateSettings(**{**asdict(settings), "steps": 1}), jobs[0], config)  # warm up
    for number, job in todo:
        turn = number % len(variants)  # no setting is always the first, or always behind the same one
        painted = {}
        for label, config in variants[turn:] + variants[:turn]:
            painted[label] = _paint(model, settings, job, config)
            on_progress(len(record) * len(variants) + len(painted), total)
        plain = painted[BASELINE][0]
        record[job.name] = {
            label: {"seconds": seconds, "lpips": distance(image, plain), "kept": kept}
            for label, (image, seconds, kept) in painted.items()
        }
        write_atomically(out / "measured.json", json.dumps({"about": about, "rows": record}).encode())
    return [_trial(label, config, [record[job.name] for job in jobs]) for label, config in ladder]


def _paint(
    model: LoadedModel, settings: GenerateSettings, job: Job, config: MaMeConfig | None
) -> tuple[Image.Image, float, float]:
    """The job's image, its seconds, and the share of the tokens that the level with the most tokens keeps."""
    handle = None if config is None else merge_in(model, config)
    try:
        start = time.perf_counter()
        (image,) = sample(model, settings, [job])
        seconds = time.perf_counter() - start
        return image, seconds, 1.0 if handle is None else _kept(levels_of(handle))
    finally:
        if handle is not None:
            handle.remove()


def choose(trials: Sequence[Trial], max_lpips: float | None, min_speedup: float | None) -> Trial:
    """The fastest trial of at most `max_lpips`, or the one of least LPIPS that is at least `min_speedup` times faster.

    Raises UserError when there is none: it names the nearest.
    """
    if max_lpips is not None:
        fit = [t for t in trials if t.lpips <= max_lpips and t.times_faster > 1]
        if fit:
            return max(fit, key=lambda t: t.times_faster)
        near = min(trials, key=lambda t: t.lpips)
        wish = f"LPIPS of at most {max_lpips:g} that is faster than no merging"
    else:
        assert min_speedup is not None
        fit = [t for t in trials if t.times_faster >= min_speedup]
        if fit:
            return min(fit, key=lambda t: t.lpips)
        near = max(trials, key=lambda t: t.times_faster)
        wish = f"at least {min_speedup:g} times the speed"
    raise UserError(
        f"expected a setting with {wish}, the nearest is {near.label}: LPIPS {near.lpips:.4f}, "
        f"{near.times_faster:.2f} times faster; ask for less"
    )


def whole(config: MaMeConfig) -> dict[str, Any]:
    """All of `config` for a file that no later version's defaults change.

    What follows from keep (the cell, `batch`) is left to it, so that another tau or keep can take its place; so is
    `merge` unless it was given, since transformers merge queries too where nobody asked for less.
    """
    fields = {name: value for name, value in config.to_dict().items() if value is not None}
    left = {"stride", "merge"} - config.given.keys() | {"batch"}
    rest = {name: value for name, value in fields.items() if name not in left}
    return rest if MaMeConfig.from_dict(rest) == config else fields


def table(trials: Sequence[Trial], chosen: Trial | None) -> str:
    """The trade-off as text: settings numbered as in `text_plot`, an arrow at the chosen one."""
    width = max(len(t.label) for t in trials)
    lines = [f"      {'setting':<{width}}  kept  s per image  times faster   LPIPS"]
    for number, t in enumerate(trials, 1):
        mark = "->" if t is chosen else "  "
        lines.append(
            f"{mark} {number:>2} {t.label:<{width}}  {t.kept:4.0%}  {t.seconds:11.2f}  {t.times_faster:12.2f}  {t.lpips:6.4f}"
        )
    return "\n".join(lines)


def text_plot(trials: Sequence[Trial], width: int = 60, height: int = 12) -> str:
    """LPIPS (upward) over times faster (rightward) as text; each point is its setting's number in the table."""
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    low, high = min(t.times_faster for t in trials), max(t.times_faster for t in trials)
    top = max(t.lpips for t in trials)
    for number, t in enumerate(trials, 1):
        column = round((t.times_faster - low) / (high - low or 1) * width)
        grid[height - round(t.lpips / (top or 1) * height)][column] = str(number % 10)
    rows = ["  |" + "".join(row).rstrip() for row in grid]
    axis = f"{low:.2f}" + f"{high:.2f} times faster".rjust(width - 3)
    return "\n".join([f"LPIPS, top {top:.4f}", *rows, "  +" + "-" * (width + 1), "   " + axis])


def _trial(label: str, config: MaMeConfig, rows: Sequence[dict[str, dict[str, float]]]) -> Trial:
    return Trial(
        label=label,
        config=config,
        seconds=float(np.median([row[label]["seconds"] for row in rows])),
        times_faster=float(np.median([row[BASELINE]["seconds"] / row[label]["seconds"] for row in rows])),
        lpips=float(np.mean([row[label]["lpips"] for row in rows])),
        kept=float(np.mean([row[label]["kept"] for row in rows])),
    )


def _kept(levels: Sequence[dict[str, Any]]) -> float:
    return float(levels[0]["tokens_kept"] / levels[0]["tokens_in"])


def _digest(settings: list[Any], model: LoadedModel) -> str:
    about = json.dumps([settings, model.identity, environment(model)], sort_keys=True, default=str)
    return hashlib.sha256(about.encode()).hexdigest()


def _read(path: Path, about: str) -> dict[str, dict[str, dict[str, float]]]:
    """Rows of an earlier call with the same settings on the same machine; none otherwise."""
    try:
        found = json.loads(path.read_bytes())
        return dict(found["rows"]) if found["about"] == about else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _short(value: Any) -> str:
    return (
        "x".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if value.__class__ is float
        else str(value)
    )
