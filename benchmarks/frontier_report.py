"""The frontier as a table, a plot and a verdict on every rival."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.methods import FLOOR, OURS

Point = dict[str, Any]
FEW = 16  # points that all have room for a name
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


def plot(points: list[Point], path: Path) -> None:
    """LPIPS (on a logarithmic scale) over UNet time and over attention work, one colour a family,
    as a .png.

    Over time a line joins the points that nothing beats in both; they, tomesd and the default are
    named, or all where they are few.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(10, 12), layout="constrained")
    shown = [p for p in points if p["lpips"] > 0]
    named = {p["name"] for p in on_frontier(points) if p["family"] == OURS} | {
        "default",
        "tomesd 0.25",
        "tomesd 0.5",
    }
    if len(shown) <= FEW:
        named = {p["name"] for p in shown}
    for ax, key, label in (
        (axes[0], "times_faster", "denoiser, times as fast as unmerged"),
        (axes[1], "work", "self-attention work, share of the unmerged"),
    ):
        for family in dict.fromkeys(p["family"] for p in shown):
            group = [p for p in shown if p["family"] == family]
            ax.scatter([p[key] for p in group], [p["lpips"] for p in group], label=family, s=28)
        ax.set_yscale("log")
        ax.set_xlabel(label)
        ax.set_ylabel("LPIPS to the unmerged image")
        ax.grid(alpha=0.3)
    line = sorted((p for p in on_frontier(points) if p in shown), key=lambda p: p["times_faster"])
    axes[0].plot(
        [p["times_faster"] for p in line], [p["lpips"] for p in line], color="0.6", lw=1, zorder=0
    )
    style: dict[str, Any] = {
        "fontsize": 7,
        "textcoords": "offset points",
        "rotation": -25,
        "rotation_mode": "anchor",
    }
    for point in (p for p in shown if p["name"] in named):
        axes[0].annotate(
            point["name"], (point["times_faster"], point["lpips"]), xytext=(5, -3), **style
        )
    axes[0].margins(x=0.13)  # room for the names
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
