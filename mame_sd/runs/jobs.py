"""Define what a run has to make: settings, one job for each image, batches, and starting noise."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mame_sd.errors import unexpected
from mame_sd.runs.options import option
from mame_sd.runs.prompt_files import Prompt, check_unique, prompts_digest

if TYPE_CHECKING:
    import torch

MAX_IMAGES = 1_000_000  # images of a run, or steps
MAX_SIDE = 65536  # pixels


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Settings for sampling the images of a run; each field's help text describes it.

    A prompt's own seed and negative prompt override these.

    Raises:
        UserError: a value is not allowed.
    """

    steps: int = option(20, "Denoising steps, at least 1. More are slower and give finer images.")
    guidance: float | None = option(
        None, "Classifier-free guidance scale. By default the model's own."
    )
    seed: int = option(
        0, "Seed of the run. An image's noise depends only on seed, prompt id and repeat."
    )
    height: int | None = option(
        None, "Height in pixels, a multiple of 8; needs --width. By default the model's own."
    )
    width: int | None = option(
        None, "Width in pixels, a multiple of 8; needs --height. By default the model's own."
    )
    negative_prompt: str | None = option(None, "Negative prompt: what images should not show.")
    batch_size: int = option(
        1, "Images computed together. Faster on a GPU; changes pixels slightly."
    )
    images_per_prompt: int = option(1, "Images of each prompt, each from different noise.")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "images_per_prompt"):
            flag, value = f"--{name.replace('_', '-')}", getattr(self, name)
            if value < 1:
                raise unexpected(flag, "at least 1", value, "raise it")
            if value > MAX_IMAGES:
                raise unexpected(flag, f"at most {MAX_IMAGES:,}", f"{value:,}", "lower it")
        for name in ("height", "width"):
            side = getattr(self, name)
            if side is not None and (side % 8 or not 8 <= side <= MAX_SIDE):
                allowed = f"a multiple of 8 pixels from 8 to {MAX_SIDE}"
                near = min(max(8, side - side % 8), MAX_SIDE)
                raise unexpected(f"--{name}", allowed, side, f"try {near}")
        if (self.height is None) != (self.width is None):  # diffusers would ignore the other
            got = f"{self.height} and {self.width}"
            raise unexpected("--height, --width", "both or neither", got, "give both")
        if not 0 <= self.seed < 2**63:
            allowed = "a whole number from 0 to 2^63 - 1"
            raise unexpected("--seed", allowed, self.seed, "choose another")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise unexpected("--guidance", "a finite number", self.guidance, "give one such as 7.5")


@dataclass(frozen=True)
class Job:
    """One image to make: `prompt`, for the `repeat`-th time, with its final seed."""

    prompt: Prompt
    repeat: int
    seed: int
    negative_prompt: str | None

    @property
    def name(self) -> str:
        """Return the name of its file, without ending."""
        return f"{self.prompt.id}_{self.repeat}"

    @property
    def steered(self) -> bool:
        """Return True if it has a negative prompt."""
        return self.negative_prompt is not None

    @property
    def known(self) -> dict[str, Any]:
        """Return the entries of samples.jsonl that are known before the image is made."""
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


def jobs_of(prompts: Sequence[Prompt], settings: GenerateSettings) -> list[Job]:
    """Return every image of the run, in order, or raise UserError if ids collide."""
    count = len(prompts) * settings.images_per_prompt
    if count > MAX_IMAGES:
        allowed = f"at most {MAX_IMAGES:,} images of a run"
        raise unexpected("--images-per-prompt", allowed, f"{count:,}", "give fewer")
    check_unique(prompts)
    jobs = []
    for prompt in prompts:
        seed = settings.seed if prompt.seed is None else prompt.seed
        own = prompt.negative_prompt
        negative = settings.negative_prompt if own is None else own
        jobs += [Job(prompt, n, seed, negative) for n in range(settings.images_per_prompt)]
    return jobs


def described_sampling(prompts: Sequence[Prompt], settings: GenerateSettings) -> dict[str, Any]:
    """Return the sampling settings, and number and digest of the prompts, for the manifest.

    `guidance` is omitted if the model's own applies, which the settings don't contain.
    """
    values = asdict(settings)
    if settings.guidance is None:
        del values["guidance"]
    return {**values, "prompts": {"count": len(prompts), "sha256": prompts_digest(prompts)}}


def cut_batches(jobs: Sequence[Job], batch_size: int) -> list[list[Job]]:
    """Return batches of neighbours, at most `batch_size` in each.

    Either all jobs of a batch have a negative prompt or none has, because some models (SDXL) read
    none as zeros, not as an empty text.
    """
    batches: list[list[Job]] = []
    for job in jobs:
        last = batches[-1] if batches else []
        if last and last[0].steered == job.steered and len(last) < batch_size:
            last.append(job)
        else:
            batches.append([job])
    return batches


def generator_of(job: Job) -> torch.Generator:
    """Return the CPU generator of an image's noise, seeded by seed, prompt id and repeat alone."""
    import torch  # slow, and the options of commands come from this module

    key = json.dumps([job.seed, job.prompt.id, job.repeat]).encode()
    return torch.Generator("cpu").manual_seed(
        int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
    )
