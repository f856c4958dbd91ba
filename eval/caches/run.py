"""The run behind `mame-sd-eval cache`: passages and prompts, resumable, one JSON line for each
result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mame_sd.runs.files import check_place

from ..store import Store
from ..tables import named
from .measure import Meter, measure_passage
from .model import load_language_model
from .retrieval import Prompt, measure_prompt, prompts
from .rows import all_rows
from .settings import CacheSettings
from .texts import Passage, passages, text_files

FORMAT = "mame-sd caches 1"
KEYS = ("model", "half", "case", "kind", "length", "row", "share")
REPEAT = "\n\nRepeat the previous context exactly.\n"


def run_cache(
    settings: CacheSettings, out: Path, on_progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Measures what `out` does not hold yet, and returns all results of these settings.

    Raises:
        UserError: no such rows, no model, no texts, or an `out` of another device or dtype.
    """
    check_place(out, out)
    rows = list(named(settings.rows, all_rows()).values())
    folder = None if settings.texts is None else Path(settings.texts)
    files = text_files(folder) if settings.num else {}
    how = {name: getattr(settings, name) for name in ("rest", "device", "dtype", "revision")}
    store = Store(out / "results.jsonl", FORMAT, "results of caches", how, KEYS)
    model, tokenizer = load_language_model(
        settings.model,
        None if settings.weights_dir is None else Path(settings.weights_dir),
        settings.offline,
        settings.device,
        settings.dtype,
        settings.revision,
    )

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    length = settings.length
    cases: list[Passage | Prompt] = []
    if settings.num:
        cases += passages(tokens, files, settings.half, settings.num, length, settings.rest)
    for task in settings.asked:
        cases += prompts(task, tokenizer, settings.prompts, length)
    with Meter(model, tokens(REPEAT)) as meter:
        for number, case in enumerate(cases, 1):
            kind = "text" if isinstance(case, Passage) else case.task
            about = {
                "model": settings.model,
                "half": settings.half,
                "case": case.name,
                "kind": kind,
                "length": length,
            }

            def done(row: str, share: float, about: dict[str, Any] = about) -> bool:
                return store.key({**about, "row": row, "share": share}) in store.found

            measure: Any = measure_passage if isinstance(case, Passage) else measure_prompt
            for result in measure(meter, case, rows, settings.kept, done):
                store.add({**about, **result})
            on_progress(number, len(cases))
    names = {row.name for row in rows} | {"full"}
    of = {case.name for case in cases}
    return [
        line
        for line in store.found.values()
        if line["case"] in of and line["row"] in names and line["length"] == length
    ]
