"""results.json: bad entries are named, and junk anywhere is named or shown."""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mame_sd.errors import UserError
from mame_sd.eval.json_text import json_text
from mame_sd.eval.report import frontier
from mame_sd.eval.report.headline import comparison, headline
from mame_sd.eval.report.render import table_csv
from mame_sd.eval.report.select import cases, focus
from mame_sd.eval.results.read import parse
from tests.builders.report_example import example
from tests.builders.report_page import Results


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["metrics"], None, "metrics: expected Sequence, got None"),
        (["metrics", 3, "better"], "bigger", "metrics[3].better: expected one of lower, higher"),
        (["rows", 0, "family"], "other", "rows[0].family: expected one of baseline, tomesd"),
        (["rows", 0, "measured"], "done", "rows[0].measured: expected bool, got 'done'"),
        (["rows", 0, "run"], "../other", "expected run to be a folder inside, got ../other"),
        (["rows", 0, "run"], "/other", "expected run to be a folder inside, got /other"),
        (["rows", 0, "values", "fid"], 3.0, "values['fid']: expected a value, got 3.0"),
        (["rows", 4, "per_image", "lpips"], {"1": "far"}, "['1']: expected int or float"),
        (["rows", 0, "values", "latency", "mean"], math.nan, "expected int or float, got nan"),
        (["rows"], [3], "rows[0]: expected a row, got 3"),
        (["pictures", 0], {}, "pictures[0].key: expected an entry, got None"),
    ],
)
def test_bad_results_are_named(results: Results, path: list[Any], value: Any, message: str) -> None:
    target: Any = results
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    with pytest.raises(UserError, match=re.escape(message)):
        parse(results)


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


@settings(max_examples=60, deadline=None)
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


def test_results_are_read_back_as_they_were_written(results: Results) -> None:
    parsed = parse(results)
    text = json_text(parsed.to_json())
    assert parse(json.loads(text)) == parsed
