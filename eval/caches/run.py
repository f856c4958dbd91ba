"""The run behind `mame-sd-eval cache`: passages and prompts, resumable, one JSON line for each
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.files import check_place
from mame_sd.runs.model_files import ModelChoice

from ..store import Store
from ..tables import named
from .measure import Meter, measure_passage
from .model import load_language_model
from .retrieval import TASKS, measure_prompt, prompts
from .rows import SHARES, all_rows, sharing
from .texts import HALVES, passages, text_files

FORMAT = "mame-sd caches 1"
KEYS = ("model", "half", "case", "kind", "length", "row", "share")
REPEAT = "\n\nRepeat the previous context exactly.\n"


@dataclass(frozen=True)
class CacheSettings:
    """What `mame-sd-eval cache` measures.

    Attributes:
        texts: folder of texts; None: Python's own library.
        half: of the texts: "report", or "development" for tuning.
        num: passages.
        prompts: of each retrieval task.
        length, rest: tokens of a passage's prompt, and of what follows it.
        shares: of the cache that stays.
        tasks: retrieval tasks; empty: none.
        device, dtype, revision: as `load_language_model` takes them.
    """

    model: str
    texts: Path | None
    half: str
    num: int
    prompts: int
    length: int
    rest: int
    rows: str | None
    tasks: tuple[str, ...]
    weights_dir: Path | None
    offline: bool
    shares: tuple[float, ...] = SHARES
    device: str = "auto"
    dtype: str = "float32"
    revision: str | None = None

    def check(self) -> None:
        """Raises UserError for what can't be."""
        limits = (
            ("--num", self.num, 0),
            ("--prompts", self.prompts, 1),
            ("--length", self.length, 64),
            ("--rest", self.rest, 2),
        )
        for name, value, least in limits:
            if value < least:
                raise UserError(f"{name}: expected at least {least}, got {value}")
        if self.half not in HALVES:
            raise UserError(f"--half: expected {' or '.join(HALVES)}, got {self.half!r}")
        for share in self.shares:
            if not 0 < share < 1:
                raise UserError(f"--shares: expected shares above 0 and below 1, got {share}")
        for task in self.tasks:
            if task not in TASKS:
                raise UserError(f"--tasks: expected some of {', '.join(TASKS)}, got {task!r}")
        named(self.rows, all_rows())
        ModelChoice(device=self.device, dtype=self.dtype)  # which knows them
        if self.num:
            text_files(self.texts)


def run_cache(
    settings: CacheSettings, out: Path, on_progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Measures what `out` does not hold yet, and returns all results of these settings.

    Raises:
        UserError: bad settings, no model, no texts, or an `out` of another device or dtype.
    """
    check_place(out, out)
    settings.check()
    rows = list(named(settings.rows, all_rows()).values())
    how = {name: getattr(settings, name) for name in ("rest", "device", "dtype", "revision")}
    store = Store(out / "results.jsonl", FORMAT, "results of caches", how, KEYS)
    model, tokenizer = load_language_model(
        settings.model,
        settings.weights_dir,
        settings.offline,
        settings.device,
        settings.dtype,
        settings.revision,
    )

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    length, shares = settings.length, settings.shares
    wanted = (settings.texts, settings.half, settings.num, length, settings.rest)
    texts = passages(tokens, *wanted) if settings.num else []
    asked = [
        p for task in settings.tasks for p in prompts(task, tokenizer, settings.prompts, length)
    ]
    every: list[Any] = [*texts, *asked]
    with Meter(model, tokens(REPEAT)) as meter:
        for number, case in enumerate(every, 1):
            about = {"model": settings.model, "half": settings.half, "case": case.name}
            about |= {"kind": getattr(case, "task", "text"), "length": length}

            def done(row: str, share: float, about: dict[str, Any] = about) -> bool:
                return store.key({**about, "row": row, "share": share}) in store.found

            measure: Callable[..., Iterator[dict[str, Any]]]
            measure = measure_passage if about["kind"] == "text" else measure_prompt
            for result in measure(meter, case, sharing(rows), shares, done):
                store.add({**about, **result})
            on_progress(number, len(every))
    cases = {case.name for case in every}
    names = {row.name for row in rows} | {"full"}
    return [
        r
        for r in store.found.values()
        if r["case"] in cases and r["row"] in names and r["length"] == length
    ]
