"""The run behind `mame-sd-eval cache`: passages and prompts, resumable, one JSON line for each
result.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.files import check_place, writing

from .measure import Meter, measure_passage
from .model import load_language_model
from .retrieval import TASKS, measure_prompt, prompts
from .rows import chosen_rows, sharing
from .texts import HALVES, passages, text_files

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
        shares: of the cache that stays; None: each row's own.
        tasks: retrieval tasks; empty: none.
    """

    model: str
    texts: Path | None
    half: str
    num: int
    prompts: int
    length: int
    rest: int
    rows: str | None
    shares: tuple[float, ...] | None
    tasks: tuple[str, ...]
    weights_dir: Path | None
    offline: bool

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
        for share in self.shares or ():
            if not 0 < share < 1:
                raise UserError(f"--shares: expected shares above 0 and below 1, got {share}")
        for task in self.tasks:
            if task not in TASKS:
                raise UserError(f"--tasks: expected some of {', '.join(TASKS)}, got {task!r}")
        chosen_rows(self.rows)
        if self.num:
            text_files(self.texts)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results of a file; a line that was cut off by a stop is left out.

    Raises UserError for a file that can't be read, or whose lines are no results.
    """
    found = []
    try:
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
        for result in found:
            key_of(result)
    except (OSError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: expected results of mame-sd-eval cache, got another file ({error!r}); choose"
            " another --out"
        ) from None
    return found


def run_cache(
    settings: CacheSettings, out: Path, on_progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Measures what `out` does not hold yet, and returns all results of these settings.

    Raises:
        UserError: bad settings, no model, no texts.
    """
    check_place(out, out)
    settings.check()
    path = out / "results.jsonl"
    kept = read_results(path)
    rows = chosen_rows(settings.rows)
    model, tokenizer = load_language_model(settings.model, settings.weights_dir, settings.offline)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    texts = (
        []
        if not settings.num
        else passages(
            tokens, settings.texts, settings.half, settings.num, settings.length, settings.rest
        )
    )
    asked = [
        p
        for task in settings.tasks
        for p in prompts(task, tokenizer, settings.prompts, settings.length)
    ]
    common = {"model": settings.model, "half": settings.half}
    with writing(path):
        out.mkdir(parents=True, exist_ok=True)
    have = {key_of(r) for r in kept}
    with path.open("a", encoding="utf-8") as file, Meter(model, tokens(REPEAT)) as meter:
        if file.tell() and not path.read_bytes().endswith(b"\n"):  # a line that was cut off
            file.write("\n")

        def write(case: str, kind: str, length: int, results: Iterable[dict[str, Any]]) -> None:
            for result in results:
                result_row = {**common, "case": case, "kind": kind, "length": length, **result}
                have.add(key_of(result_row))
                kept.append(result_row)
                print(json.dumps(result_row), file=file, flush=True)

        for i, passage in enumerate(texts):
            size = settings.length

            def done(row: str, share: float, case: str = passage.name, size: int = size) -> bool:
                return (
                    key_of(
                        {
                            **common,
                            "case": case,
                            "kind": "text",
                            "length": size,
                            "row": row,
                            "share": share,
                        }
                    )
                    in have
                )

            found = measure_passage(meter, passage, sharing(rows), settings.shares, done)
            write(passage.name, "text", size, found)
            on_progress(i + 1, len(texts) + len(asked))
        for i, prompt in enumerate(asked):

            def answered(
                row: str, share: float, case: str = prompt.name, kind: str = prompt.task
            ) -> bool:
                size = settings.length
                return (
                    key_of(
                        {
                            **common,
                            "case": case,
                            "kind": kind,
                            "length": size,
                            "row": row,
                            "share": share,
                        }
                    )
                    in have
                )

            found = measure_prompt(meter, prompt, sharing(rows), settings.shares, answered)
            write(prompt.name, prompt.task, settings.length, found)
            on_progress(len(texts) + i + 1, len(texts) + len(asked))
    (out / "settings.json").write_text(
        json.dumps({k: str(v) for k, v in asdict(settings).items()}, indent=1) + "\n"
    )
    cases = {p.name for p in texts} | {p.name for p in asked}
    wanted = {row.name for row in rows} | {"full"}
    return [
        r
        for r in kept
        if r["case"] in cases and r["row"] in wanted and r["length"] == settings.length
    ]


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a result one of its own."""
    return tuple(
        result[name] for name in ("model", "half", "case", "kind", "length", "row", "share")
    )
