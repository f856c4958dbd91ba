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
import sys
from collections.abc import Mapping, Sequence

import torch

from benchmarks.cards import CARDS, LAUNCH, SLOW_LAUNCH, Card
from benchmarks.gpu_models import CASES, Case, On, rows_of
from benchmarks.launches import META, Work, counted, on_card, pretended
from mame_sd.eval.tables import markdown_table

Seconds = tuple[float, float, float]  # likely, harsh, attention twice as fast
Rows = dict[str, dict[str, tuple[int, Seconds]]]  # launches and seconds by row and card


def count(case: Case, on: On) -> list[Work]:
    """Count the kernels of one forward of a case within `on`."""
    model = on_card(case.build(META))
    with on(model):
        with pretended():
            named, known = case.inputs(model)
        repeats = {model.get_submodule(path): times for path, times in case.repeats.items()}
        with pretended(known):
            return counted(lambda: model(**named), repeats)


def seconds(work: Sequence[Work], card: Card) -> Seconds:
    """Reckon one forward: likely, harsh, and with attention in half of its time, as Flash 3 or Sage
    may have it.
    """
    faster = [one._replace(flops=one.flops / 2) if "attention" in one.kind else one for one in work]
    harsh = card.harsh.eager(work, SLOW_LAUNCH)
    return card.eager(work, LAUNCH), harsh, card.eager(faster, LAUNCH)


def reckon(case: Case, cards: Sequence[Card]) -> Rows:
    """Reckon launches and seconds of each row, by card."""
    found: Rows = {}
    works: dict[tuple[str, int], list[Work]] = {}
    for card in cards:
        for row, on in rows_of(card.min_tokens).items():
            key = row, card.min_tokens if row.startswith("default") else 0
            if key not in works:
                works[key] = count(case, on)
            launches = sum(one.launches for one in works[key])
            found.setdefault(row, {})[card.name] = launches, seconds(works[key], card)
    return found


def table(row: str, found: Mapping[str, Rows]) -> str:
    """Show one row of all cases as Markdown: times as fast as unmerged, likely / harsh / faster
    attention; of the unmerged models the milliseconds, likely.
    """
    lines, cards = [], []
    for name, rows in found.items():
        counts = sorted({count for count, _ in rows[row].values()})
        cells = [name, " to ".join(f"{count:,}" for count in counts)]
        for card, (_, own) in rows[row].items():
            pairs = zip(rows["unmerged"][card][1], own, strict=True)
            gains = "/".join(f"{plain / took:.2f}" for plain, took in pairs)
            cells.append(f"{1e3 * own[0]:,.1f} ms" if row == "unmerged" else gains)
        lines.append(cells)
        cards = [card.removeprefix("GeForce RTX ") for card in rows[row]]
    return markdown_table([row, "launches", *cards], lines) + "\n"


def card_named(text: str) -> str:
    """Return the name of the one card that `text` names or is part of, such as `4090`.

    Raises argparse.ArgumentTypeError for none or several.
    """
    fitting = [name for name in CARDS if text.lower() in name.lower()]
    if text not in CARDS and len(fitting) != 1:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(CARDS)}, or a part of one name, got {text!r}"
        )
    return text if text in CARDS else fitting[0]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=CASES, default=CASES, metavar="NAME")
    parser.add_argument("--card", nargs="+", type=card_named, default=CARDS, metavar="NAME")
    args = parser.parse_args()
    found = {}
    for name in args.model:
        print(f"counting {name}", file=sys.stderr)
        found[name] = reckon(CASES[name](), [CARDS[card] for card in args.card])
    for row in rows_of(0):
        print(table(row, found))
    print("Reckoned from counted kernels, not measured on a card.")


if __name__ == "__main__":
    main()
