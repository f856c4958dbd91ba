"""Schedulers by name, which replace a model's own."""

from __future__ import annotations

from typing import Any

from mame_sd.errors import UserError, first_line

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {}),
    "dpm++-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "dpm++-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}


def check_scheduler(name: str | None) -> None:
    """Raise UserError for a scheduler that is none of `SCHEDULERS`."""
    if name is not None and name not in SCHEDULERS:
        raise UserError(
            f"--scheduler: expected one of {', '.join(SCHEDULERS)}, got {name!r}; leave it out for"
            " the model's own"
        )


def set_scheduler(pipe: Any, name: str) -> None:
    """Replace the model's scheduler by the named one, with the model's noise schedule."""
    import diffusers

    class_name, extra = SCHEDULERS[name]
    kinds = [*pipe.scheduler.compatibles, type(pipe.scheduler)]
    if class_name not in {kind.__name__ for kind in kinds}:
        raise UserError(
            f"--scheduler {name}: expected a scheduler that fits the model's"
            f" {type(pipe.scheduler).__name__}, got {class_name}; leave it out"
        )
    try:
        pipe.scheduler = getattr(diffusers, class_name).from_config(pipe.scheduler.config, **extra)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise UserError(
            f"--scheduler {name}: it does not fit this model ({first_line(error)}); choose another,"
            " or leave it out"
        ) from error
