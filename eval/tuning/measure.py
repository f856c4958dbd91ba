"""Measure settings: what each costs in LPIPS to the unmerged image, and what it gains in speed.

Every prompt is a round of interleaved timing. It makes an image without merging, one with each
setting, and one with mean attention. In that one the output of every layer that could merge is its
mean. All start from the same noise. The last one says whether these prompts can tell settings apart
at all. Speed is that of the whole pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mame_sd.config import MaMeConfig
from mame_sd.core.devices import least_tokens
from mame_sd.runs.files import check_place, write_atomically
from mame_sd.runs.jobs import GenerateSettings, Job, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt
from mame_sd.runs.sampling import levels_of, merge_in, sample

from ..images import to_float
from ..metrics.lpips import load_lpips
from ..rivals.layers import rival_on
from ..rivals.plans import constant
from ..stats import mean_interval
from ..timing import interleaved, quartiles, timed
from .calibrate import digest, read_rows

BASELINE = "baseline"
FLOOR = "mean attention"
MEASURED = "measured.json"
Distance = Callable[[Image.Image, Image.Image], float]


@dataclass(frozen=True)
class Trial:
    """One setting: means over the prompts of LPIPS, medians of seconds an image and of times faster
    than unmerged.

    Attributes:
        config: the setting; None: the baseline, or what stands for the floor.
        interval: of 95 %, of the mean LPIPS over prompts; None: too few prompts.
        quartiles: of times faster.
        kept: share of the tokens (keys, for kv) that the layers of the level with the most tokens
            keep.
    """

    label: str
    config: MaMeConfig | None
    seconds: float
    times_faster: float
    lpips: float
    kept: float
    interval: tuple[float, float] | None = None
    quartiles: tuple[float, float] = (1.0, 1.0)


def lpips_distance(weights_dir: Path | None = None, offline: bool = False) -> Distance:
    """LPIPS of two images. Raises UserError when the weights can't be had: it says what to do."""
    measure = load_lpips(weights_dir=weights_dir, offline=offline)
    return lambda a, b: float(measure(to_float([np.asarray(a)]), to_float([np.asarray(b)])))


def tune(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    rows: Sequence[tuple[str, MaMeConfig]],
    distance: Distance,
    out: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """Measure every setting of `rows`, after the baseline and before the floor.

    What is done stands in `out`/measured.json, and the same call continues.

    Raises:
        UserError: a setting with which nothing could merge, or that the model refuses.
        MachineError: the disk, memory.
    """
    check_place(out, out)
    jobs = jobs_of(prompts, settings)
    said = [(label, config.to_dict()) for label, config in rows]
    about = digest([asdict(settings), [asdict(job) for job in jobs], said], model)
    found = read_rows(out / MEASURED, about)
    least = least_tokens(rows[0][1].min_tokens, model.pipe.device)
    configs: dict[str, MaMeConfig | None] = {BASELINE: None, **dict(rows), FLOOR: None}

    def image(label: str, job: Job, settings: GenerateSettings) -> tuple[Image.Image, float, float]:
        with _merging(model, label, configs[label], least) as handle:
            (made,), seconds = timed(lambda: sample(model, settings, [job]), model.pipe.device)
            return made, seconds, 1.0 if handle is None else _kept(levels_of(handle))

    rounds = interleaved(
        list(configs),
        len(jobs),
        lambda label, number: image(label, jobs[number], settings),
        done={number for number, job in enumerate(jobs) if job.name in found},
        warm_up=lambda label: image(label, jobs[0], replace(settings, steps=1)),
        on_progress=on_progress,
    )
    for number, made in rounds:
        plain = made[BASELINE][0]
        found[jobs[number].name] = {
            label: {"seconds": seconds, "lpips": distance(image, plain), "kept": kept}
            for label, (image, seconds, kept) in made.items()
        }
        write_atomically(out / MEASURED, json.dumps({"about": about, "rows": found}).encode())
    return [
        _trial(label, config, {job.name: found[job.name] for job in jobs})
        for label, config in configs.items()
    ]


@contextmanager
def _merging(
    model: LoadedModel, label: str, config: MaMeConfig | None, least: int
) -> Iterator[Any]:
    """The model as a row has it; gives the handle of one that merges, None for others."""
    if label == FLOOR:
        with rival_on(model.pipe, lambda: constant(scale=1.0), "qkv", least):
            yield None
    elif config is None:
        yield None
    else:
        handle = merge_in(model, config)
        try:
            yield handle
        finally:
            handle.remove()


def _trial(
    label: str, config: MaMeConfig | None, rows: dict[str, dict[str, dict[str, float]]]
) -> Trial:
    low, faster, high = quartiles(
        [row[BASELINE]["seconds"] / row[label]["seconds"] for row in rows.values()]
    )
    near = mean_interval(
        {name: row[label]["lpips"] for name, row in rows.items()}, {name: name for name in rows}
    )
    return Trial(
        label=label,
        config=config,
        seconds=quartiles([row[label]["seconds"] for row in rows.values()])[1],
        times_faster=faster,
        lpips=near["mean"],
        kept=float(np.mean([row[label]["kept"] for row in rows.values()])),
        interval=None if near["low"] is None else (near["low"], near["high"]),
        quartiles=(low, high),
    )


def _kept(levels: Sequence[dict[str, Any]]) -> float:
    return float(levels[0]["tokens_kept"] / levels[0]["tokens_in"])
