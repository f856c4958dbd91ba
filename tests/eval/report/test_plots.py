"""The plot of the frontier."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mame_sd.eval.report import frontier, render
from mame_sd.eval.report.figures import STYLE, WIDE, new_figure
from mame_sd.eval.report.select import focus
from mame_sd.eval.results.read import parse
from mame_sd.eval.results.schema import Row
from tests.builders.report_example import row
from tests.builders.report_page import Results


def points(pairs: list[tuple[float, float]]) -> list[frontier.Point]:
    empty = Row(name="r", label="r", family="mame", measured=True)
    return [frontier.Point(empty, speed, distance) for speed, distance in pairs]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12),
    st.booleans(),
)
def test_nothing_surpasses_the_frontier(pairs: list[tuple[float, float]], lower: bool) -> None:
    found = points(pairs)
    best = frontier.frontier(found, lower)
    sign = 1 if lower else -1

    def surpasses(a: frontier.Point, b: frontier.Point) -> bool:
        at_least = a.speed >= b.speed and sign * a.closeness <= sign * b.closeness
        return at_least and (a.speed, a.closeness) != (b.speed, b.closeness)

    kept = {(p.speed, p.closeness) for p in best}
    assert kept == {
        (p.speed, p.closeness) for p in found if not any(surpasses(other, p) for other in found)
    }
    assert [p.speed for p in best] == sorted({p.speed for p in best})


def test_points_are_rows_with_both_figures(results: Results) -> None:
    parsed = parse(results)
    found = {p.row.name: p for p in frontier.points(parsed, focus(parsed))}
    assert set(found) == {"baseline", "tomesd-50", "mame-tau-0.8", "mame-default"}
    assert (found["baseline"].speed, found["baseline"].closeness) == (1, 0)
    assert found["mame-default"].speed_interval == pytest.approx((4 / 2.6, 4 / 2.4))
    row(results, "mame-default")["values"]["lpips"]["mean"] = math.inf
    parsed = parse(results)
    assert len(frontier.points(parsed, focus(parsed))) == 3


def test_names_that_would_hide_others_are_left_out() -> None:
    rows = [
        Row(
            name=f"r{n}",
            label=f"a row of many, number {n}",
            family="mame",
            default=n == 7,
            measured=True,
        )
        for n in range(12)
    ]
    found = [frontier.Point(one, 2 + 0.001 * n, 0.5) for n, one in enumerate(rows)]
    found.append(frontier.Point(replace(rows[0], label="alone"), 1, 0.1))
    with matplotlib.rc_context(STYLE):
        axes = new_figure(WIDE, 400).subplots()
        best = frontier.frontier(found, lower=True)
        frontier._draw(axes, found, best)
        axes.figure.draw_without_rendering()
        frontier._label(axes, found, best)
        boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert {"a row of many, number 7", "alone"} <= boxes.keys()
    assert len(boxes) < 8
    for one, other in combinations(boxes.values(), 2):
        assert not one.overlaps(other)


def test_plots_that_cannot_be_drawn_are_explained(tmp_path: Path, results: Results) -> None:
    for entry in results["rows"]:
        entry["values"].pop("latency", None)
    text = render(parse(results), tmp_path).read_text(encoding="utf-8")
    assert "<svg" not in text
    assert "This plot needs the speed and the closeness of at least two rows" in text
