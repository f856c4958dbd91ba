"""Tokens kept per level and denoising step: one image made once more, counted step by step."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings, Job
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.sampling import sample

from ..results.schema import Kept
from .bench import installed
from .rows import Row


def kept_per_step(model: LoadedModel, settings: GenerateSettings, job: Job, row: Row) -> list[Kept]:
    """Tokens that came and that were kept (means over layers) for each step and level; empty where
    nothing can tell.

    Levels count from 0, the one with the most tokens. With merge "kv" kept tokens are keys.
    """
    found: list[Kept] = []
    if row.method is None or "callback_on_step_end" not in model.arguments:
        return found
    with installed(model, row, [job]) as method:
        assert method is not None

        def count(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            with suppress(UserError):  # nothing merges at this size
                for level in method.levels():
                    tokens, kept = level["tokens_in"], level["tokens_kept"]
                    found.append(Kept(step, level["level"], tokens, kept))
            method.begin([job])
            return values

        sample(model, settings, [job], callback_on_step_end=count)
    return found
