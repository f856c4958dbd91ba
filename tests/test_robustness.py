"""Test the list of seeded faults, which code that moves would leave behind."""

from __future__ import annotations

from scripts.robustness.mutations import ROOT, faults


def test_each_seeded_fault_is_one_place_of_its_file() -> None:
    stale = {
        (file, old)
        for file, old, *_ in faults()
        if (ROOT / file).read_text(encoding="utf-8").count(old) != 1
    }
    assert stale == set()


def test_the_tests_of_each_fault_exist() -> None:
    named = {test.partition("::")[0] for *_, tests in faults() for test in tests}
    assert {name for name in named if not (ROOT / name).exists()} == set()
