"""Generate images from a list of prompts into a run folder: plan, batches, resuming, sharing over processes.

The starting latent of an image depends on (seed, prompt id, repeat) alone. Its pixels also depend on the batch it is
computed in, so batches are cut from the whole list before finished images are skipped: a batch with one image missing
is computed whole, and only what is missing is written.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings, Job, cut_batches, plan_jobs
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.methods import MaMePatch, Patch, PatchedModel
from mame_sd.runs.processes import Shard
from mame_sd.runs.prompt_files import Prompt, prompts_digest
from mame_sd.runs.run_folder import RunFolder
from mame_sd.runs.sampling import sample, to_png

NOT_MERGED = "made without merging, for no layer has tokens enough (--min-tokens)"


@dataclass(frozen=True)
class Summary:
    """How a run ended: images in all and made by this process now; means over all of the folder's images."""

    images: int
    made: int
    seconds_per_image: float | None
    levels: list[dict[str, Any]]


def generate(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    config: MaMeConfig | Patch | None,
    out: Path,
    *,
    prompt_file: dict[str, Any] | None = None,
    shard: Shard | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Summary:
    """Make every image that `out` lacks; `config` None is the baseline, a `Patch` another method than merging.

    Args:
        prompt_file: name and digest of the file the prompts came from, for the manifest; nothing is compared with it.
        shard: this process among several, which must have joined one another (`mame_sd.runs.processes.joined`).
        on_progress: told (images done, images of this process) at the start and after each batch.
        on_note: told of what the user should know.

    Raises:
        UserError, MachineError: everything made before stays; the same call continues.
    """
    shard = shard or Shard()
    patch = MaMePatch(config) if isinstance(config, MaMeConfig) else config
    jobs = plan_jobs(prompts, settings)
    batches = cut_batches(jobs, settings.batch_size)
    sizes = {(job.height, job.width) for job in jobs}
    folder = RunFolder(out, shard.rank)
    known = {job.name: job.known for job in jobs}
    described = describe_settings(model, prompts, settings, patch)
    rows: list[dict[str, Any]] = []
    complete = False
    try:
        if shard.is_main:
            manifest = {"settings": described, "environment": environment(model), "prompt_file": prompt_file}
            for note in folder.prepare(manifest):
                on_note(f"the folder was begun elsewhere, so pixels may differ a little ({note})")
            folder.collect(known)
        shard.wait()
        done = folder.finished(list(known))
        shard.wait()  # nobody writes before everybody has looked
        pending = [batch for batch in batches if any(job.name not in done for job in batch)][shard.rank :: shard.count]
        first = FirstBatch(shard)
        try:
            made = _make(model, pending, done, settings, patch, described, folder, on_progress, on_note, sizes, first)
        except UserError as error:
            first.agree(error)
            raise
        first.agree()
        shard.wait()
        if shard.is_main:
            rows = folder.collect(known)
        complete = True
    finally:
        folder.close(complete and shard.is_main)
    if patch is not None and rows and all(row.get("levels") == [] for row in rows):
        raise UserError(
            f"expected at least one image in which tokens merge, got none of {len(rows)}; lower --min-tokens, raise "
            "--height and --width, or use --baseline in another --out"
        )
    return _summary(rows, len(jobs), made)


class FirstBatch:
    """What is wrong with the method or the model shows in the first batch: then it is raised on every process."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._agreed = False

    def agree(self, problem: UserError | None = None) -> None:
        """Tells the others, once, how the first batch went; raises the first problem that any of them had."""
        if self._agreed:
            return
        self._agreed = True
        problems = [found for found in self._shard.everywhere(problem) if found is not None]
        if problems:
            raise problems[0]


def _make(
    model: LoadedModel,
    batches: Sequence[Sequence[Job]],
    done: set[str],
    settings: GenerateSettings,
    patch: Patch | None,
    described: dict[str, Any],
    folder: RunFolder,
    on_progress: Callable[[int, int], None],
    on_note: Callable[[str], None],
    sizes: set[tuple[int | None, int | None]],
    first: FirstBatch,
) -> int:
    """Compute `batches`, write the images that are not `done`, and return how many were written.

    `sizes` are the (height, width) of all of the run's images; only when none of them can merge is that an error.
    """
    total = sum(job.name not in done for batch in batches for job in batch)
    unmerged: set[tuple[int | None, int | None]] = set()
    patched = None if patch is None or not batches else patch.install(model)
    made = 0
    try:
        on_progress(0, total)
        for batch in batches:
            if patched is not None:
                patched.begin(batch)
            start = time.perf_counter()
            images = sample(model, settings, batch)
            seconds = (time.perf_counter() - start) / len(batch)
            levels = [] if patched is None else _levels(patched, batch[0], sizes, unmerged, on_note)
            note = {"note": NOT_MERGED} if patched is not None and not levels else {}
            for job, image in zip(batch, images, strict=True):
                if job.name not in done:
                    size = {"width": image.width, "height": image.height}
                    record = {**job.known, **size, "seconds": seconds, "batch": len(batch), "levels": levels, **note}
                    folder.write_image(job.name, to_png(image, job, described), record)
                    made += 1
            on_progress(made, total)
            first.agree()
    finally:
        if patched is not None:
            patched.remove()
    return made


def _levels(
    patched: PatchedModel,
    job: Job,
    sizes: set[tuple[int | None, int | None]],
    unmerged: set[tuple[int | None, int | None]],
    on_note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Levels of a batch like `job`; empty, with a note for each size, where nothing can merge at its size.

    Raises UserError when that is so for all of the run's `sizes`; `unmerged` collects them.
    """
    try:
        return patched.levels()
    except UserError:
        size = (job.height, job.width)
        if unmerged | {size} >= sizes:
            raise
        if size not in unmerged:
            on_note(f"{job.name} and others of its size: {NOT_MERGED}")
        unmerged.add(size)
        return []


def describe_settings(
    model: LoadedModel, prompts: Sequence[Prompt], settings: GenerateSettings, patch: Patch | None
) -> dict[str, Any]:
    """All that decides the pixels, as JSON values: what a run folder is begun with and must be continued with."""
    return {
        **asdict(settings),
        "guidance": model.guidance if settings.guidance is None else settings.guidance,
        "model": model.identity,
        "prompts": {"count": len(prompts), "sha256": prompts_digest(prompts)},
        "mame": None,
        **({} if patch is None else patch.describe()),
    }


def environment(model: LoadedModel) -> dict[str, Any]:
    """What may change the last bit of a pixel without being a setting: versions, threads, the device's name."""
    device = model.pipe.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {**versions(), "threads": torch.get_num_threads(), "device": name}


def versions() -> dict[str, Any]:
    """Of Python and the packages that images and scores depend on."""
    packages = ("mame-sd", "torch", "diffusers", "transformers", "numpy", "pillow")
    return {**{name: _version(name) for name in packages}, "python": platform.python_version()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _summary(rows: Sequence[dict[str, Any]], images: int, made: int) -> Summary:
    """Means over the images of the folder: seconds, and tokens per level."""
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), float)]
    by_level: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        for level in row.get("levels", []):
            by_level.setdefault(level["level"], []).append(level)
    levels = []
    for number, found in sorted(by_level.items()):
        tokens_in, kept = (sum(level[key] for level in found) / len(found) for key in ("tokens_in", "tokens_kept"))
        levels.append({"level": number, "tokens_in": tokens_in, "tokens_kept": kept, "share": kept / tokens_in})
    return Summary(images, made, sum(seconds) / len(seconds) if seconds else None, levels)
