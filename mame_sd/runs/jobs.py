"""What a run has to make: settings, one job for each image, batches, and the noise that each image
starts from.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mame_sd.errors import UserError
from mame_sd.runs.options import option
from mame_sd.runs.prompt_files import Prompt, check_unique

if TYPE_CHECKING:
    import torch

MAX_IMAGES = 1_000_000  # of a run; and steps, which nobody waits for
MAX_SIDE = 65536


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """How every image of a run is sampled; each field's help text says what it means.

    A prompt's own seed and negative prompt take the place of these.

    Raises:
        UserError: naming the option, its range and the value that came.
    """

    steps: int = option(20, "Denoising steps, at least 1. More is slower and finer.")
    guidance: float | None = option(
        None, "Classifier-free guidance scale. Without it, the model's own."
    )
    seed: int = option(
        0, "Seed of the run. An image's noise depends on seed, prompt id and repeat alone."
    )
    height: int | None = option(
        None, "Height in pixels, a multiple of 8. Without both sides, the model's own."
    )
    width: int | None = option(
        None, "Width in pixels, a multiple of 8. Without both sides, the model's own."
    )
    negative_prompt: str | None = option(None, "What to steer away from.")
    batch_size: int = option(
        1, "Images computed together. Faster on a GPU; pixels depend on it a little."
    )
    images_per_prompt: int = option(1, "Images of each prompt, from different noise.")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "images_per_prompt"):
            flag, value = f"--{name.replace('_', '-')}", getattr(self, name)
            if value < 1:
                raise UserError(f"{flag}: expected at least 1, got {value}; raise it")
            if value > MAX_IMAGES:
                raise UserError(f"{flag}: expected at most {MAX_IMAGES:,}, got {value:,}; lower it")
        for name in ("height", "width"):
            side = getattr(self, name)
            if side is not None and (side % 8 or not 8 <= side <= MAX_SIDE):
                raise UserError(
                    f"--{name}: expected a multiple of 8 pixels from 8 to {MAX_SIDE}, got {side}; "
                    f"try {min(max(8, side - side % 8), MAX_SIDE)}"
                )
        if (self.height is None) != (self.width is None):  # diffusers would ignore the other
            raise UserError(
                f"--height, --width: expected both or neither, got {self.height} and {self.width};"
                " give both"
            )
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**63):
            raise UserError(
                f"--seed: expected a whole number from 0 to 2^63 - 1, got {self.seed}; choose"
                " another"
            )
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise UserError(
                f"--guidance: expected a finite number, got {self.guidance}; give one such as 7.5"
            )


@dataclass(frozen=True)
class Job:
    """One image to make: `prompt`, the `repeat`-th time, with its final seed."""

    prompt: Prompt
    repeat: int
    seed: int
    negative_prompt: str | None

    @property
    def name(self) -> str:
        return f"{self.prompt.id}_{self.repeat}"

    @property
    def steered(self) -> bool:
        """Whether it has a negative prompt, as all images of one call have or none has."""
        return self.negative_prompt is not None

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


def jobs_of(prompts: Sequence[Prompt], settings: GenerateSettings) -> list[Job]:
    """Every image of the run, in order. Raises UserError for ids that collide, or too many."""
    count = len(prompts) * settings.images_per_prompt
    if count > MAX_IMAGES:
        raise UserError(
            f"--images-per-prompt: expected at most {MAX_IMAGES:,} images of a run, got {count:,};"
            " give fewer"
        )
    check_unique(prompts)
    jobs = []
    for prompt in prompts:
        seed = settings.seed if prompt.seed is None else prompt.seed
        own = prompt.negative_prompt
        negative = settings.negative_prompt if own is None else own
        for repeat in range(settings.images_per_prompt):
            jobs.append(Job(prompt, repeat, seed, negative))
    return jobs


def cut_batches(jobs: Sequence[Job], batch_size: int) -> list[list[Job]]:
    """Neighbours, at most `batch_size` together. Depends on the whole list alone.

    All of a batch have a negative prompt or none has: some models (SDXL) take none to mean zeros,
    not an empty text.
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
    """The CPU generator of an image's noise, seeded by a hash of (seed, prompt id, repeat) and
    nothing else.
    """
    # here, since the command line's options come from this module and should be there at once
    import torch

    key = json.dumps([job.seed, job.prompt.id, job.repeat]).encode()
    return torch.Generator("cpu").manual_seed(
        int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
    )
