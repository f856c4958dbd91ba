"""Generate images of prompts into a run folder, which several processes may share.

The starting noise of an image depends on (seed, prompt id, repeat) alone, but its pixels also
depend on its batch. Batches are therefore cut from the whole list, and a batch with one image
missing is computed as a whole; only missing images are written.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError
from mame_sd.runs.jobs import GenerateSettings, Job, cut_batches, described_sampling, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import InstalledMethod, Merging, Method
from mame_sd.runs.processes import Process
from mame_sd.runs.prompt_files import Prompt
from mame_sd.runs.run_folder import RunFolder
from mame_sd.runs.sampling import sample, to_png


@dataclass(frozen=True)
class Summary:
    """Count a run's images, and hold means over all of them.

    `made` counts the images that this process made, and `found` those that were there before.
    """

    images: int
    made: int
    found: int
    seconds_per_image: float | None
    levels: list[dict[str, Any]]


def generate(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    method: MaMeConfig | Method | None,
    out: Path,
    *,
    process: Process | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
) -> Summary:
    """Make every image that a run folder lacks.

    Args:
        model: the model.
        prompts: the prompts.
        settings: how images are sampled.
        method: settings of merging, another method, or None for the unmerged model.
        out: the run folder.
        process: this process among several, which must have `joined` one another.
        on_progress: called with the numbers of images done and in all of this process.
        on_step: called with the numbers of steps done and in all, if the pipeline reports them.

    Raises:
        UserError, MachineError: all images made before are kept, and the same call continues.
    """
    process = process or Process()
    if isinstance(method, MaMeConfig):
        method = Merging(model.resolved(method))
    jobs = jobs_of(prompts, settings)
    by_name = {job.name: job.known for job in jobs}
    folder = RunFolder(out)
    # All that decides pixels. A folder must be continued with the settings it was begun with.
    described = {
        **described_sampling(prompts, settings),
        "guidance": model.guidance if settings.guidance is None else settings.guidance,
        "model": model.identity,
        "mame": None,
        **({} if method is None else method.describe()),
    }
    run = _Run(model, settings, method, jobs, described, folder, process, on_progress, on_step)
    about = {"settings": described, "environment": environment(model.pipe.device)}
    rows: list[dict[str, Any]] = []
    complete = False
    try:
        if process.is_main:
            folder.prepare(about)
            folder.collect(by_name)
        process.wait()
        done = folder.finished(by_name)
        process.wait()  # nobody writes before everybody has looked
        made = run.make_all_but(done)
        process.wait()
        if process.is_main:
            rows = folder.collect(by_name)
            if len(rows) < len(jobs):
                raise MachineError(
                    f"{folder.images}: expected the run's {len(jobs)} images, found {len(rows)}"
                    " whole, because others were deleted or changed meanwhile; the same command"
                    " makes them again"
                )
        complete = True
    finally:
        folder.close(complete and process.is_main)
    return _summary(rows, len(jobs), made, len(done))


@dataclass
class _Run:
    """State that all batches of a run share."""

    model: LoadedModel
    settings: GenerateSettings
    method: Method | None
    jobs: Sequence[Job]
    described: dict[str, Any]
    folder: RunFolder
    process: Process
    on_progress: Callable[[int, int], None]
    on_step: Callable[[int, int], None]

    def make_all_but(self, done: set[str]) -> int:
        """Compute this process's batches, write the images that are not `done`, and count them.

        If the first batch fails because of the method or the model, every process raises the error.
        """
        batches = cut_batches(self.jobs, self.settings.batch_size)
        batches = [batch for batch in batches if any(job.name not in done for job in batch)]
        batches = batches[self.process.rank :: self.process.count]
        total = sum(job.name not in done for batch in batches for job in batch)
        installed: InstalledMethod | None = None
        problem: UserError | None = None
        made = 0
        self.on_progress(0, total)
        try:
            try:
                if self.method is not None and batches:
                    installed = self.method.install(self.model)
                made += sum(self._make(batch, done, installed) for batch in batches[:1])
            except UserError as error:
                problem = error
            for failure in filter(None, self.process.all_gather(problem)):
                raise failure
            for batch in batches[1:]:
                self.on_progress(made, total)
                made += self._make(batch, done, installed)
        finally:
            if installed is not None:
                installed.remove()
        self.on_progress(made, total)
        return made

    def _make(self, batch: Sequence[Job], done: set[str], installed: InstalledMethod | None) -> int:
        if installed is not None:
            installed.begin(batch)
        start = time.perf_counter()
        images = sample(self.model, self.settings, batch, on_step=self.on_step)
        seconds = (time.perf_counter() - start) / len(batch)
        levels = [] if installed is None else installed.levels()
        about = {"seconds": seconds, "batch": len(batch), "levels": levels}
        pairs = zip(batch, images, strict=True)
        missing = [(job, image) for job, image in pairs if job.name not in done]
        for job, image in missing:
            record = {**job.known, "width": image.width, "height": image.height, **about}
            self.folder.write_image(job.name, to_png(image, job, self.described), record)
        return len(missing)


def environment(device: torch.device) -> dict[str, Any]:
    """Return what may change the last bit of a pixel: versions, threads, the device's name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {**versions(), "threads": torch.get_num_threads(), "device": name}


def versions() -> dict[str, Any]:
    """Return versions of Python and of packages that images and scores depend on, or None."""
    installed: dict[str, Any] = {"python": platform.python_version()}
    for package in ("mame-sd", "torch", "diffusers", "transformers", "numpy", "pillow"):
        installed[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def _summary(rows: Sequence[dict[str, Any]], images: int, made: int, before: int) -> Summary:
    """Return means over the images of the folder: seconds, and tokens of each level."""
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), float)]
    every = [level for row in rows for level in row.get("levels", [])]
    levels = []
    for kind, number in sorted({(level.get("kind", ""), level["level"]) for level in every}):
        those = [one for one in every if (one.get("kind", ""), one["level"]) == (kind, number)]
        tokens_in, kept = (fmean(one[key] for one in those) for key in ("tokens_in", "tokens_kept"))
        merged = any(one.get("layers_merged", 1) for one in those)
        level = {"kind": kind, "level": number, "tokens_in": tokens_in, "tokens_kept": kept}
        levels.append({**level, "merged": merged, "share": kept / tokens_in})
    return Summary(images, made, before, fmean(seconds) if seconds else None, levels)
