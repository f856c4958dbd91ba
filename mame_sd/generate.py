"""Generate images from a list of prompts into a run folder: plan, batches, resuming, sharing over processes.

The starting latent of an image depends on (seed, prompt id, repeat) alone. Its pixels also depend on the batch it is
computed in, so batches are cut from the whole list before finished images are skipped: a batch with one image missing
is computed whole, and only what is missing is written.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError
from mame_sd.models import LoadedModel
from mame_sd.prompt_files import Prompt, check_unique, prompts_digest
from mame_sd.run_folder import RunFolder
from mame_sd.shards import Shard

if TYPE_CHECKING:
    from mame_sd.hooks import MaMeHandle

MAX_SIDE = 65536


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """How every image of a run is sampled.

    Attributes:
        steps: denoising steps, at least 1.
        guidance: classifier-free guidance scale; None: the model's own.
        seed: of the run, at least 0.
        height, width: pixels, multiples of 8; None: the model's own.
        batch_size: images computed together, at least 1. Pixels depend on it, a little.
        images_per_prompt: repeats of each prompt, at least 1.
        negative_prompt: what to steer away from; a prompt's own takes its place.

    Raises:
        UserError: naming the option, its range and the value that came.
    """

    steps: int = 20
    guidance: float | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    batch_size: int = 1
    images_per_prompt: int = 1
    negative_prompt: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "images_per_prompt"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}; raise it")
        for name in ("height", "width"):
            side = getattr(self, name)
            if side is not None and (side % 8 or not 8 <= side <= MAX_SIDE):
                raise UserError(
                    f"--{name}: expected a multiple of 8 pixels from 8 to {MAX_SIDE}, got {side}; "
                    f"try {min(max(8, side - side % 8), MAX_SIDE)}"
                )
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed: expected a whole number from 0 to 2^63 - 1, got {self.seed}; choose another")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise UserError(f"--guidance: expected a finite number, got {self.guidance}; give one such as 7.5")


@dataclass(frozen=True)
class Job:
    """One image to make: `prompt`, the `repeat`-th time, with its final seed and size (None: the model's own)."""

    prompt: Prompt
    repeat: int
    seed: int
    negative_prompt: str | None
    height: int | None
    width: int | None

    @property
    def name(self) -> str:
        return f"{self.prompt.id}_{self.repeat}"

    @property
    def known(self) -> dict[str, Any]:
        """What samples.jsonl says of the image without its being made."""
        known: dict[str, Any] = {
            "id": self.prompt.id,
            "repeat": self.repeat,
            "file": f"images/{self.name}.png",
            "prompt": self.prompt.text,
            "seed": self.seed,
        }
        if self.negative_prompt is not None:
            known["negative_prompt"] = self.negative_prompt
        return {**known, "extra": self.prompt.extra} if self.prompt.extra else known


@dataclass(frozen=True)
class Summary:
    """How a run ended: images in all and made by this process now; means over all of the folder's images."""

    images: int
    made: int
    seconds_per_image: float | None
    levels: list[dict[str, Any]]


def plan_jobs(prompts: Sequence[Prompt], settings: GenerateSettings) -> list[Job]:
    """Every image of the run, in order. Raises PromptError for ids that collide."""
    check_unique(prompts)
    return [
        Job(
            prompt=prompt,
            repeat=repeat,
            seed=settings.seed if prompt.seed is None else prompt.seed,
            negative_prompt=settings.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt,
            height=prompt.height or settings.height,
            width=prompt.width or settings.width,
        )
        for prompt in prompts
        for repeat in range(settings.images_per_prompt)
    ]


def cut_batches(jobs: Sequence[Job], batch_size: int) -> list[list[Job]]:
    """Neighbours of one size, at most `batch_size` together. Depends on the whole list alone."""
    batches: list[list[Job]] = []
    for job in jobs:
        last = batches[-1] if batches else []
        same = bool(last) and (last[0].height, last[0].width) == (job.height, job.width)
        if same and len(last) < batch_size:
            last.append(job)
        else:
            batches.append([job])
    return batches


def generator_of(job: Job) -> torch.Generator:
    """The CPU generator of an image's noise, seeded by a hash of (seed, prompt id, repeat) and nothing else."""
    key = json.dumps([job.seed, job.prompt.id, job.repeat]).encode()
    return torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1)


def sample(model: LoadedModel, settings: GenerateSettings, jobs: Sequence[Job], **extra: Any) -> list[Image.Image]:
    """One call of the pipeline: an RGB image for each of `jobs`, which share a size. `extra` goes to the call too.

    Raises:
        UserError: an argument that the pipeline does not take, or refuses.
        MachineError: pixels that are no numbers (16-bit overflow), out of memory.
    """
    call: dict[str, Any] = {
        "prompt": [job.prompt.text for job in jobs],
        "num_inference_steps": settings.steps,
        "generator": [generator_of(job) for job in jobs],
        "output_type": "np",
        **extra,
    }
    if any(job.negative_prompt is not None for job in jobs):
        call["negative_prompt"] = [job.negative_prompt or "" for job in jobs]
    guidance = model.guidance if settings.guidance is None else settings.guidance
    if guidance is not None:
        call["guidance_scale"] = guidance
    height, width = jobs[0].height, jobs[0].width
    if height is not None or width is not None:  # diffusers ignores one without the other
        default = (0, 0) if height and width else model.default_size
        call.update(height=height or default[0], width=width or default[1])
    for name in call:
        if name not in model.arguments:
            raise UserError(f"--{name.replace('_', '-')}: {type(model.pipe).__name__} does not take it; leave it out")
    try:
        images = np.asarray(model.pipe(**call).images)  # [B, H, W, 3] in [0, 1]
    except ValueError as error:  # the pipeline's own checks of its inputs
        raise UserError(
            f"expected settings that {type(model.pipe).__name__} takes, but {error}; change them"
        ) from error
    if not np.isfinite(images).all():
        raise MachineError(
            f"expected pixels, got nan for prompt {jobs[0].prompt.id!r} in {model.identity['dtype']}; "
            "use --dtype float32 or bfloat16"
        )
    return [Image.fromarray(pixels) for pixels in (images * 255).round().astype(np.uint8)]


def generate(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    config: MaMeConfig | None,
    out: Path,
    *,
    shard: Shard | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Summary:
    """Make every image that `out` lacks; `config` None is the baseline.

    Args:
        shard: this process among several, which must have joined one another (`mame_sd.shards.joined`).
        on_progress: told (images done, images of this process) at the start and after each batch.
        on_note: told of what the user should know.

    Raises:
        UserError, MachineError: everything made before stays; the same call continues.
    """
    shard = shard or Shard()
    jobs = plan_jobs(prompts, settings)
    batches = cut_batches(jobs, settings.batch_size)
    folder = RunFolder(out, shard.rank)
    known = {job.name: job.known for job in jobs}
    described = describe_settings(model, prompts, settings, config)
    rows: list[dict[str, Any]] = []
    complete = False
    try:
        if shard.is_main:
            for note in folder.prepare({"settings": described, "environment": environment(model)}):
                on_note(f"the folder was begun elsewhere, so pixels may differ a little ({note})")
            folder.collect(known)
        shard.wait()
        done = folder.finished(list(known))
        shard.wait()  # nobody writes before everybody has looked
        pending = [batch for batch in batches if any(job.name not in done for job in batch)][shard.rank :: shard.count]
        made = _make(model, pending, done, settings, config, described, folder, on_progress)
        shard.wait()
        if shard.is_main:
            rows = folder.collect(known)
        complete = True
    finally:
        folder.close(complete and shard.is_main)
    return _summary(rows, len(jobs), made)


def _make(
    model: LoadedModel,
    batches: Sequence[Sequence[Job]],
    done: set[str],
    settings: GenerateSettings,
    config: MaMeConfig | None,
    described: dict[str, Any],
    folder: RunFolder,
    on_progress: Callable[[int, int], None],
) -> int:
    """Compute `batches`, write the images that are not `done`, and return how many were written."""
    total = sum(job.name not in done for batch in batches for job in batch)
    handle = None if config is None or not batches else merge_in(model, config)
    made = 0
    try:
        on_progress(0, total)
        for batch in batches:
            if handle is not None:
                handle.reset()
            start = time.perf_counter()
            images = sample(model, settings, batch)
            seconds = (time.perf_counter() - start) / len(batch)
            levels = [] if handle is None else levels_of(handle)
            for job, image in zip(batch, images, strict=True):
                if job.name not in done:
                    size = {"width": image.width, "height": image.height}
                    record = {**job.known, **size, "seconds": seconds, "batch": len(batch), "levels": levels}
                    folder.write_image(job.name, to_png(image, job, described), record)
                    made += 1
            on_progress(made, total)
    finally:
        if handle is not None:
            handle.remove()
    return made


def merge_in(model: LoadedModel, config: MaMeConfig) -> MaMeHandle:
    """`apply_mame` on a loaded model. Raises UserError for a model that merging does not support."""
    from mame_sd.hooks import apply_mame

    try:
        return apply_mame(model.pipe, config)
    except (TypeError, ValueError) as error:
        raise UserError(f"--model {model.identity['name']}: {error}; choose another model, or --baseline") from error


def levels_of(handle: MaMeHandle) -> list[dict[str, Any]]:
    """Tokens in and kept per level since the last reset. Raises UserError when nothing could merge."""
    from mame_sd.report import NothingMergedError

    try:
        return [asdict(level) for level in handle.report().levels()]
    except NothingMergedError as error:
        raise UserError(" ".join(str(error).split()) + " (--min-tokens, --height and --width, --baseline)") from None


def to_png(image: Image.Image, job: Job, described: dict[str, Any]) -> bytes:
    """The image as PNG, with text chunks ``prompt`` (plain) and ``mame_sd`` (JSON: settings, id, repeat, seed).

    Nothing in it depends on time, place or batch neighbours. A zero byte, which PNG text can't hold, becomes U+2400.
    """
    text = PngInfo()
    text.add_itxt("prompt", job.prompt.text.replace("\0", "\u2400"))
    own = {"id": job.prompt.id, "repeat": job.repeat, "prompt": job.prompt.text, "seed": job.seed}
    own["negative_prompt"] = job.negative_prompt
    settings = {key: value for key, value in described.items() if key != "prompts"}
    text.add_text("mame_sd", json.dumps({**settings, **own}, sort_keys=True))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=text)
    return buffer.getvalue()


def describe_settings(
    model: LoadedModel, prompts: Sequence[Prompt], settings: GenerateSettings, config: MaMeConfig | None
) -> dict[str, Any]:
    """All that decides the pixels, as JSON values: what a run folder is begun with and must be continued with."""
    return {
        **asdict(settings),
        "guidance": model.guidance if settings.guidance is None else settings.guidance,
        "model": model.identity,
        "mame": None if config is None else config.to_dict(),
        "prompts": {"count": len(prompts), "sha256": prompts_digest(prompts)},
    }


def environment(model: LoadedModel) -> dict[str, Any]:
    """What may change the last bit of a pixel without being a setting: versions, threads, the device's name."""
    packages = ("mame-sd", "torch", "diffusers", "transformers", "numpy", "pillow")
    versions: dict[str, Any] = {name: _version(name) for name in packages}
    device = model.pipe.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {**versions, "python": platform.python_version(), "threads": torch.get_num_threads(), "device": name}


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
