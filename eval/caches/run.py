"""The run behind `mame-sd-eval cache`: passages and questions, resumable, one JSON line for each
result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mame_sd.runs.files import check_place
from mame_sd.runs.model_files import ModelChoice

from ..store import Store
from ..tables import named
from .measure import Case, Meter, measure
from .model import load_language_model
from .retrieval import questions
from .rows import all_rows
from .settings import CacheSettings
from .texts import passages, text_files

FORMAT = "mame-sd caches 1"
KEYS = ("model", "half", "case", "kind", "length", "row", "share")
REPEAT = "\n\nRepeat the previous context exactly.\n"


def run_cache(
    settings: CacheSettings,
    choice: ModelChoice,
    out: Path,
    on_progress: Callable[[int, int], object],
) -> list[dict[str, Any]]:
    """Measures what `out` does not hold yet, and returns all results of these settings.

    Raises:
        UserError: no such rows, no model, no texts, or an `out` of another device or dtype.
    """
    check_place(out, out)
    rows = list(named(settings.rows, all_rows()).values())
    folder, weights = (
        None if given is None else Path(given) for given in (settings.texts, settings.weights_dir)
    )
    files = text_files(folder) if settings.num else {}
    how = {name: getattr(choice, name) for name in ("device", "dtype", "revision")}
    how = {"rest": settings.rest, **how}
    store = Store(out / "results.jsonl", FORMAT, "results of caches", how, KEYS)
    model, tokenizer = load_language_model(choice, weights)

    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    length = settings.length
    cases: list[Case] = []
    if settings.num:
        cases += passages(tokens, files, settings.half, settings.num, length, settings.rest)
    for task in settings.asked:
        cases += questions(task, tokens, settings.prompts, length)
    run = {"model": choice.model, "half": settings.half, "length": length}
    with Meter(model, tokens(REPEAT)) as meter:
        for number, case in enumerate(cases, 1):
            about = {**run, "case": case.name, "kind": case.kind}

            def done(row: str, share: float, about: dict[str, Any] = about) -> bool:
                return store.key({**about, "row": row, "share": share}) in store.found

            for result in measure(meter, case, rows, settings.kept, done):
                store.add({**about, **result})
            on_progress(number, len(cases))
    names, of = {row.name for row in rows} | {"full"}, {case.name for case in cases}
    return [
        line
        for line in store.found.values()
        if line["case"] in of and line["row"] in names and line["length"] == length
    ]
