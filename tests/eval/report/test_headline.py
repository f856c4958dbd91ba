"""The headline and the points of the plot: what they claim, and what they do not."""

from __future__ import annotations

import copy
import math
import re

import pytest

from mame_sd.eval.report.headline import cards, comparison, headline
from mame_sd.eval.report.plot import points
from mame_sd.eval.report.select import focus
from tests.builders.report_example import Results, parsed, row, speed


def says(results: Results) -> str:
    found = parsed(results)
    return headline(focus(found))


def test_headline_of_faster_slower_and_equal_rows(results: Results) -> None:
    fast = r"MaMe \(default\) is 1\.60 times as fast as the baseline \(1\.54 to 1\.67\), "
    assert re.fullmatch(fast + r"at an LPIPS of 0\.\d{4}\.", says(results))
    found = parsed(results)
    assert comparison(found, focus(found)).startswith(
        "The nearest and fastest rival, ToMeSD 50 %, is 1.25 times as fast as the baseline ("
    )
    ours = row(results, "mame-default")["values"]
    ours |= speed(8.0, 7.9, 8.1)
    slower = "is slower than the baseline (0.50 times as fast, 0.49 to 0.51), at an LPIPS"
    assert slower in says(results)
    ours |= speed(3.8, 3.0, 4.5)
    noise = "is not measurably faster or slower than the baseline (1.05 times as fast"
    assert f"{noise}, 0.89 to 1.33)" in says(results)
    ours["speedup"] = {"mean": 1.05, "n": 1}
    assert f"{noise})" in says(results), "one round tells nothing"


def test_the_nearest_and_the_fastest_rival_are_named(results: Results) -> None:
    other = copy.deepcopy(row(results, "tomesd-50"))
    other |= {"name": "fewer-1", "label": "one step fewer", "family": "rival"}
    other["values"] |= speed(1.0, 0.9, 1.1)
    other["values"]["lpips"] = {"mean": 0.9, "low": 0.8, "high": 1.0, "n": 3}
    results["rows"].append(other)
    found = parsed(results)
    said = comparison(found, focus(found))
    assert said.startswith("The nearest rival, ToMeSD 50 %, is 1.25 times as fast")
    assert "The fastest rival, one step fewer, is 4.00 times as fast" in said
    assert "at an LPIPS of 0.9000." in said
    shown = [(card.role, card.row.name, card.speed) for card in cards(focus(found))]
    assert shown == [
        ("merged", "mame-default", "1.60"),
        ("nearest rival", "tomesd-50", "1.25"),
        ("fastest rival", "fewer-1", "4.00"),
    ]


def test_a_row_that_is_faster_and_closer_is_named_where_that_is_no_noise(results: Results) -> None:
    def says_so() -> bool:
        found = parsed(results)
        return "Both faster and closer: ToMeSD 50 %." in comparison(found, focus(found))

    ours, rival = row(results, "mame-default")["values"], row(results, "tomesd-50")["values"]
    assert not says_so()
    for name in ("speedup", "lpips"):
        rival[name] = {**ours[name]}
    assert not says_so(), "a tie"
    rival |= speed(1.0, 0.9, 1.1)
    assert not says_so(), "as close"
    rival["lpips"] = {"mean": ours["lpips"]["mean"] / 2, "low": 0.0, "high": ours["lpips"]["mean"]}
    assert not says_so(), "within the intervals"
    rival["lpips"] = {"mean": 1e-6, "low": 0.0, "high": 2e-6}
    assert says_so()
    rival["speedup"] = {"mean": 4.0, "n": 1}
    assert not says_so(), "one round"


def test_headline_without_speed_without_lpips_and_without_mame(results: Results) -> None:
    for entry in results["rows"]:
        entry["values"].pop("speedup", None)
    assert says(results).startswith("MaMe (default): speed was not measured; at an LPIPS of ")
    for entry in results["rows"]:
        entry["values"].pop("lpips", None)
    assert "at a PSNR of " in says(results)
    for entry in results["rows"]:
        entry["values"].pop("psnr", None)
    assert says(results).endswith("neither was its distance from the baseline.")
    results["rows"] = results["rows"][:1]
    assert says(results) == "No run with MaMe has been measured yet."


def test_cpu_time_speaks_if_a_cpu_computed(results: Results) -> None:
    about = {"unit": "s", "better": "lower", "block": "cost"}
    results["metrics"].append({"name": "cpu", "label": "CPU time", **about})
    for entry in results["rows"]:
        if "latency" in entry["values"]:
            entry["values"]["cpu"] = entry["values"]["latency"]
    assert "1.60 times as fast as the baseline by CPU time (1." in says(results)


def test_points_are_rows_with_both_figures(results: Results) -> None:
    found = parsed(results)
    shown = {p.row.name: p for p in points(found, focus(found))}
    assert set(shown) == {"baseline", "tomesd-50", "mame-tau-0.8", "mame-default"}
    assert shown["baseline"].at == (1, 0)
    assert shown["mame-default"].speed.interval == pytest.approx((4 / 2.6, 4 / 2.4))
    row(results, "mame-default")["values"]["lpips"]["mean"] = math.inf
    row(results, "tomesd-50")["family"] = "floor"
    found = parsed(results)
    assert len(points(found, focus(found))) == 2
