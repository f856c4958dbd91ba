"""The frontier as a table, and a verdict on every rival."""

from __future__ import annotations

from typing import Any

from benchmarks.methods import FLOOR, OURS

Point = dict[str, Any]
APART = 0.05  # how far the unmerged model may be from its own speed


def markdown(points: list[Point]) -> str:
    """A table, fastest last, and what our settings do to each rival."""
    lines = [
        "| setting | times faster | attention work | LPIPS | PSNR, dB | SSIM | retrieval |",
        "|---|---|---|---|---|---|---|",
    ]
    best = {point["name"] for point in on_frontier(points)}
    for point in sorted(points, key=lambda p: p["times_faster"]):
        name = f"**{point['name']}**" if point["name"] in best else point["name"]
        lines.append(
            f"| {name} | {point['times_faster']:.2f} | {point['work']:.2f} | {point['lpips']:.5f} |"
            f" {point['psnr']:.1f} | {point['ssim']:.4f} | {point['retrieval']:.2f} |"
        )
    lines += [
        "",
        "Bold: nothing is both faster and nearer to the unmerged image.",
        *_unsteady(points),
        "",
    ]
    for name, found in verdict(points).items():
        state = "beaten" if found["better"] and found["faster"] else "NOT beaten"
        lines.append(
            f"- {name}: {state}; better at its speed: {found['better']}; faster at its LPIPS:"
            f" {found['faster']}"
        )
    return "\n".join(lines) + "\n"


def _unsteady(points: list[Point]) -> list[str]:
    """A warning where rows were timed while the unmerged model was not as fast as itself."""
    off = {p["name"]: p["itself"] for p in points if abs(p.get("itself", 1) - 1) > APART}
    if not off:
        return []
    return [
        "",
        (
            f"**Not to be trusted: timed while the unmerged model was {min(off.values()):.2f} to"
            f" {max(off.values()):.2f} times as fast as itself ({', '.join(off)}). Delete their"
            " .json in points and run again on a quiet machine, or with more --rounds.**"
        ),
    ]


def on_frontier(points: list[Point]) -> list[Point]:
    """The points that no other point equals or beats in both time and LPIPS."""
    return [
        p
        for p in points
        if not any(
            q is not p
            and q["times_faster"] >= p["times_faster"]
            and q["lpips"] <= p["lpips"]
            and (q["times_faster"], q["lpips"]) != (p["times_faster"], p["lpips"])
            for q in points
        )
    ]


def verdict(points: list[Point]) -> dict[str, dict[str, str | None]]:
    """For each rival: our setting with lower LPIPS that is at least as fast, and our faster one of
    at most its LPIPS.
    """
    mine = [p for p in points if p["family"] == OURS]
    found = {}
    for rival in (p for p in points if p["family"] not in (OURS, "baseline", "variant", FLOOR)):
        better = [
            p
            for p in mine
            if p["times_faster"] >= rival["times_faster"] and p["lpips"] < rival["lpips"]
        ]
        faster = [
            p
            for p in mine
            if p["lpips"] <= rival["lpips"] and p["times_faster"] > rival["times_faster"]
        ]
        found[rival["name"]] = {
            "better": min(better, key=lambda p: p["lpips"])["name"] if better else None,
            "faster": max(faster, key=lambda p: p["times_faster"])["name"] if faster else None,
        }
    return found
