"""The runner: what it measures, in which order, and how a stopped command continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mame_sd.errors import UserError
from mame_sd.eval.runner import Store, measure_cases

CASES = ["0", "1", "2"]


def store(folder: Path, about: Any = 1, fresh: bool = False) -> Store:
    return Store(folder / "lines.jsonl", "tests 1", "numbers", about, ("case", "row"), fresh)


def run(to: Store, rows: str = "ab", stop: int = 99, **more: Any) -> tuple[list[str], list[int]]:
    """Measure `rows` on CASES until `stop` results are there; return the calls and the progress."""
    calls: list[str] = []
    progress: list[int] = []

    def measure(case: str, missing: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for row in missing:
            if len(calls) == stop:
                raise KeyboardInterrupt
            calls.append(row + case)
            yield row, {"value": row + case}

    def key(case: str, row: str) -> dict[str, Any]:
        return {"case": case, "row": row}

    try:
        measure_cases(
            to, CASES, rows, measure, key, on_progress=lambda n, _: progress.append(n), **more
        )
    except KeyboardInterrupt:
        assert stop < 99
    return calls, progress


def test_a_stopped_run_continues_with_what_is_missing(tmp_path: Path) -> None:
    assert run(store(tmp_path), stop=3) == (["a0", "b0", "a1"], [0, 1, 2, 3])
    whole = (tmp_path / "lines.jsonl").read_text()
    (tmp_path / "lines.jsonl").write_text(whole[:-4])  # within the last line
    again = store(tmp_path)
    assert run(again) == (["a1", "b1", "a2", "b2"], [2, 3, 4, 5, 6])
    assert run(again, "c")[0] == ["c0", "c1", "c2"]
    assert store(tmp_path).lines == again.lines
    assert again.lines["1", "a"] == {"case": "1", "row": "a", "value": "a1"}
    assert run(store(tmp_path), "abc") == ([], [9])


def test_rows_that_belong_together_turn_and_are_kept_when_their_case_is_whole(
    tmp_path: Path,
) -> None:
    warmed: list[str] = []
    calls, progress = run(
        store(tmp_path), "abc", stop=5, together=True, warm_up=lambda row: warmed.append(row)
    )
    assert (calls, progress) == (["a0", "b0", "c0", "c1", "b1"], [0, 1, 2, 3, 4, 5])
    assert warmed == ["a", "b", "c"]
    assert list(store(tmp_path).lines) == [("0", "a"), ("0", "b"), ("0", "c")]
    assert run(store(tmp_path), "abc", together=True) == (
        ["c1", "b1", "a1", "b2", "c2", "a2"], [3, 4, 5, 6, 7, 8, 9],
    )  # fmt: skip
    torn = store(tmp_path)
    del torn.lines["2", "b"]
    assert run(torn, "abc", together=True)[0] == ["b2", "c2", "a2"], "a case is measured whole"
    run(store(tmp_path), "abc", together=True, warm_up=warmed.append)
    assert len(warmed) == 3, "nothing is missing, so nothing warms up"


def test_a_file_of_others_is_refused_and_other_settings_are_an_error_or_begin_anew(
    tmp_path: Path,
) -> None:
    run(store(tmp_path))
    with pytest.raises(UserError, match="expected results of the same settings"):
        store(tmp_path, about=2)
    assert store(tmp_path, about=2, fresh=True).lines == {}
    for text in ("", "hello", '{"format": "tests 0", "about": 1}\n', "[1]\n"):
        (tmp_path / "lines.jsonl").write_text(text)
        with pytest.raises(UserError, match=r"expected numbers \('tests 1'\), got another file"):
            store(tmp_path)
        assert (tmp_path / "lines.jsonl").read_text() == text
