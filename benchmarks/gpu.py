"""What merging would win on graphics cards, reckoned from the kernels of whole models, without one.

    python -m benchmarks.gpu                                    # all of docs/gpu.md: minutes
    python -m benchmarks.gpu --model "SDXL at 1024" --card H100

Every operation of one forward is counted at its real size (`benchmarks/launches.py`). A card is
busy with it for the longest of three times (`benchmarks/cards.py`): that of the smallest kernel,
its bytes at the memory's speed, its products at the units' speed. *Likely* takes the shares of the
peaks that fit published times, and lets PyTorch launch a kernel in 6 us, ahead of the card. *Harsh*
lets products and attention reach three quarters of their peaks, so that less is to be saved, and a
launch take 27 us. Cells say how many times as fast as unmerged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.cards import CARDS, LAUNCH, SLOW_LAUNCH, Card, Work
from benchmarks.gpu_models import CASES, Case, On, rows_of
from benchmarks.launches import META, counted, on_card, pretended
from mame_sd.eval.tables import markdown_table

RECKONED = "Reckoned from counted kernels, not measured on a card."


def count(case: Case, on: On) -> list[Work]:
    """The kernels of one forward of a case within `on`."""
    model = on_card(case.build(META))
    with on(model):
        with pretended():
            args, kwargs, known = case.inputs(model)
        repeats = {model.get_submodule(path): times for path, times in case.repeats}
        with pretended(known):
            return counted(lambda: model(*args, **kwargs), repeats)


def seconds(work: Sequence[Work], card: Card) -> tuple[float, float]:
    """Of one forward: likely, and at harsh assumptions."""
    return card.eager(work, LAUNCH), card.harsh.eager(work, SLOW_LAUNCH)


def twice_as_fast(work: Sequence[Work]) -> list[Work]:
    """The same work where attention takes half of its time, as Flash 3 or Sage may."""
    return [one._replace(flops=one.flops / 2) if "attention" in one.kind else one for one in work]


def reckon(case: Case, cards: Sequence[Card]) -> dict[str, dict[str, Any]]:
    """Kernels, and by card the seconds (likely, harsh, attention twice as fast), of each row."""
    found: dict[str, dict[str, Any]] = {}
    works: dict[tuple[str, int], list[Work]] = {}
    for card in cards:
        for row, on in rows_of(case, card.min_tokens).items():
            key = row, card.min_tokens if row.startswith("default") else 0
            if key not in works:
                works[key] = count(case, on)
            work = works[key]
            entry = found.setdefault(row, {"launches": [], "seconds": {}})
            entry["launches"].append(sum(one.launches for one in work))
            entry["seconds"][card.name] = (
                *seconds(work, card),
                card.eager(twice_as_fast(work), LAUNCH),
            )
    return found


def table(row: str, found: Mapping[str, Mapping[str, Any]], cards: Sequence[Card]) -> str:
    """One row of all cases as Markdown: times as fast as unmerged, likely / harsh / faster
    attention; of the unmerged models the milliseconds, likely.
    """
    lines = []
    for name, rows in found.items():
        if row not in rows:
            continue
        least, most = min(rows[row]["launches"]), max(rows[row]["launches"])
        cells = [name, f"{least:,}" if least == most else f"{least:,} to {most:,}"]
        for card in cards:
            plain, own = (rows[r]["seconds"][card.name] for r in ("unmerged", row))
            cells.append(
                f"{1e3 * own[0]:,.1f} ms"
                if row == "unmerged"
                else "/".join(f"{a / b:.2f}" for a, b in zip(plain, own, strict=True))
            )
        lines.append(cells)
    names = [card.name.removeprefix("GeForce RTX ") for card in cards]
    return markdown_table([row, "launches", *names], lines) + "\n"


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", nargs="+", metavar="TEXT", help="cases whose names hold the text; default all"
    )
    parser.add_argument(
        "--card", nargs="+", metavar="TEXT", help="cards whose names hold the text; default all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no tables")
    args = parser.parse_args(argv)
    cases = _chosen(parser, "--model", args.model, CASES)
    cards = [CARDS[name] for name in _chosen(parser, "--card", args.card, CARDS)]
    found = {}
    for name in cases:
        print(f"counting {name}", file=sys.stderr)
        found[name] = reckon(CASES[name], cards)
    if args.json:
        print(json.dumps({"benchmark": "gpu", "measured": False, "note": RECKONED, "cases": found}))
        return
    for row in dict.fromkeys(row for rows in found.values() for row in rows):
        print(table(row, found, cards))
    print(RECKONED)


def _chosen(
    parser: argparse.ArgumentParser,
    option: str,
    texts: Sequence[str] | None,
    names: Mapping[str, Any],
) -> list[str]:
    """Names that are one of `texts`, or hold it where none is; without texts all."""
    found: list[str] = []
    for text in texts or ():
        own = [text] if text in names else [name for name in names if text in name]
        if not own:
            parser.error(f"{option}: expected a part of one of {', '.join(names)}; got {text!r}")
        found += own
    return list(dict.fromkeys(found)) if texts else list(names)


if __name__ == "__main__":
    main()
