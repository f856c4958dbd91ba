"""results.json: bad entries are named, and junk anywhere is named or shown."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mame_sd.errors import UserError
from mame_sd.eval.json_text import json_text
from mame_sd.eval.report import frontier, render
from mame_sd.eval.report.headline import comparison, headline
from mame_sd.eval.report.render import table_csv
from mame_sd.eval.report.select import cases, focus
from mame_sd.eval.results.read import parse
from mame_sd.eval.results.schema import Column
from tests.builders.report_example import example
from tests.builders.report_page import Results


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["metrics"], None, "expected metrics (dict), got None"),
        (
            ["metrics", "psnr", "better"],
            "bigger",
            "metrics['psnr'].better: expected one of lower, higher, got 'bigger'",
        ),
        (
            ["metrics", "psnr", "block"],
            "looks",
            "expected one of cost, fidelity, quality, got 'looks'",
        ),
        (
            ["rows", 0, "family"],
            "other",
            (
                "row 'baseline': family: expected one of baseline, tomesd, mame, tome, rival,"
                " floor, got 'other'"
            ),
        ),
        (
            ["rows", 0, "status"],
            "done",
            "row 'baseline': status: expected one of measured, not measured, got 'done'",
        ),
        (["rows", 0, "run"], "../other", "expected run to be a folder inside, got '../other'"),
        (["rows", 0, "run"], "/other", "expected run to be a folder inside, got '/other'"),
        (
            ["rows", 0, "values", "latency"],
            3.0,
            "row 'baseline': latency: expected mean (int or float), got 3.0",
        ),
        (
            ["rows", 4, "per_image", "lpips"],
            {"00001_0": "far"},
            "lpips: expected one number for each image",
        ),
        (["rows"], [3], "rows[0]: expected name (str), got 3"),
        (["images", "00001_0"], {}, "images['00001_0']: expected prompt (str), got None"),
        (["gates", 0, "passed"], "yes", "gates[0]: expected passed (bool), got 'yes'"),
    ],
)
def test_bad_results_are_named(
    tmp_path: Path, results: Results, path: list[Any], value: Any, message: str
) -> None:
    target: Any = results
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    with pytest.raises(UserError, match=re.escape(message)):
        render(results, tmp_path)
    assert not (tmp_path / "report.html").exists()


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside `value`."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path for key, item in inside for path in ((*here, key), *places(item, (*here, key)))]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return example(tmp_path_factory.mktemp("drawn"))


JUNK = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        7,
        1.5,
        -2.5,
        math.inf,
        math.nan,
        "",
        "lower",
        "x" * 99,
        [],
        [1],
        {},
        {"a": 1},
    ]
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_junk_anywhere_is_named_or_shown(drawn: Results, data: st.DataObject) -> None:
    results = copy.deepcopy(drawn)
    path = data.draw(st.sampled_from(places(drawn)))
    target: Any = results
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = data.draw(JUNK)
    try:
        parsed = parse(results)
    except UserError:
        return
    chosen = focus(parsed)
    cases(parsed, chosen)
    frontier.points(parsed, chosen)
    assert headline(chosen).endswith(".")
    assert comparison(parsed, chosen) is not None
    assert table_csv(parsed, chosen).count("\n") == 1 + len(parsed.rows)


def test_a_metric_says_which_way_is_better() -> None:
    metric = Column(key="psnr", better="higher", block="fidelity")
    assert metric.arrow == "↑"


def test_results_are_read_back_as_they_were_written(results: Results) -> None:
    parsed = parse(results)
    text = json_text(parsed.to_json())
    assert parse(json.loads(text)) == parsed
    assert set(results) - set(parsed.to_json()) == set(), "an older file keeps all that it holds"
