"""results.json: bad entries are named, and junk anywhere is named or shown."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from mame_sd.errors import UserError
from mame_sd.eval.json_text import json_text
from mame_sd.eval.results.read import parse
from tests.builders.report_page import Results


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["metrics"], None, "metrics: expected Sequence, got None"),
        (["metrics", 3, "better"], "bigger", "metrics[3].better: expected one of lower, higher"),
        (["rows", 0, "family"], "other", "rows[0].family: expected one of baseline, tomesd"),
        (["rows", 0, "measured"], "done", "rows[0].measured: expected bool, got 'done'"),
        (["rows", 0, "run"], "../other", "expected run to be a folder inside, got ../other"),
        (["rows", 4, "per_image", "lpips"], {"1": "far"}, "['1']: expected int or float"),
        (["rows", 0, "values", "latency", "mean"], math.nan, "expected int or float, got nan"),
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


def test_results_are_read_back_as_they_were_written(results: Results) -> None:
    parsed = parse(results)
    text = json_text(parsed.to_json())
    assert parse(json.loads(text)) == parsed
