"""What merging would win on graphics cards: reckoned from the kernels of whole models, with no
card; or measured on one.

    python -m benchmarks.gpu              # all of docs/gpu.md: minutes; stops and resumes
    python -m benchmarks.gpu --model "SDXL at 1024" --card H100 --rows default tomesd
    python -m benchmarks.gpu --published  # the distance to figures that others measured
    # the same rows, timed on the card that is there:
    python -m benchmarks.gpu --measure --model "SD 1.5 at 512"

Every operation of one forward is counted at its real size (`benchmarks/launches.py`). A card is
busy with it for the longest of three times (`mame_sd/core/cards.py`). These are 2.5 us, its bytes
at the memory's speed, and its products at the units' speed. *Busy* sums that up: what graphs and
`torch.compile` reach. *Eager* lets PyTorch launch one kernel in 6 us, ahead of the card. Cells say
how many times as fast as unmerged.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch

import mame_sd
from benchmarks.gpu_card import keep, measured_card
from benchmarks.gpu_models import CASES, Case, On, rows_of
from benchmarks.gpu_published import published_table
from benchmarks.launches import META, counted, on_card, pretended
from benchmarks.timing import interleaved, machine, named
from mame_sd.core.cards import CARDS, LAUNCH, Card, Work, measured_file
from mame_sd.diffusion import worth

RECKONED = "Reckoned from counted kernels, not measured on a card."
DECIDED = ("default",)  # rows that depend on the card: what is left whole there
Answers = dict[tuple[Any, Any, Any, Any], bool]  # whether merging gains, by what a layer asked


class Traces:
    """The counted kernels of cases and rows, kept in a folder until the code that they are counted
    of changes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._code = folder, _fingerprint()
        self._seen: dict[tuple[str, str], list[tuple[Answers, list[Work]]]] = {}

    def of(
        self, name: str, case: Case, row: str, on: On, card: Card | None = None, eager: bool = True
    ) -> list[Work]:
        """The kernels of one forward of a case with a row on it.

        Args:
            card: on which card, where layers ask whether merging pays there; None: they all merge.
            eager: kernels are launched from Python, where layers ask that.
        """
        asks = f"{card.name}/{eager}" if card else ""  # other rows are alike on all
        key = hashlib.sha256(f"{name}/{row}/{asks}/{self._code}".encode()).hexdigest()[:16]
        path = self._folder / f"{key}.json.gz"
        if path.is_file():
            return [_read(values) for values in json.loads(gzip.decompress(path.read_bytes()))]
        work = self._counted(name, case, row, on, card, eager)
        self._folder.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".part")
        whole.write_bytes(
            gzip.compress(
                json.dumps([[*one[:2], str(one.dtype), *one[3:]] for one in work]).encode()
            )
        )
        whole.replace(path)
        return work

    def _counted(
        self, name: str, case: Case, row: str, on: On, card: Card | None, eager: bool
    ) -> list[Work]:
        seen = self._seen.setdefault((name, row), [])
        for answers, work in seen:  # a card on which the same layers merge
            if card and all(
                worth.gains(card, *asked, eager) == said for asked, said in answers.items()
            ):
                return work
        print(
            f"counting {name}, {row}" + (f", {card.name}" if card else ""),
            file=sys.stderr,
            flush=True,
        )
        answers = {}

        def gains(card: Card, *asked: Any) -> bool:
            answers[asked[0], asked[1], asked[2], asked[3]] = found = worth_gains(card, *asked)
            return found

        worth_gains = worth.gains
        with (
            mock.patch.object(worth, "gains", gains),
            mock.patch.object(worth, "launched_from_python", return_value=eager),
        ):
            work = count(case, on, card)
        seen.append((answers, work))
        return work


def count(case: Case, on: On, card: Card | None = None) -> list[Work]:
    """The kernels of one forward of a case within `on`."""
    model = on_card(case.build(META))
    with on(model):
        with pretended():
            args, kwargs, known = case.inputs(model)
        repeats = {model.get_submodule(path): times for path, times in case.repeats}
        with pretended(known, card):
            return counted(lambda: model(*args, **kwargs), repeats)


def _read(values: Sequence[Any]) -> Work:
    name, kind, dtype, *rest = values
    return Work(name, kind, getattr(torch, dtype.removeprefix("torch.")), *rest)


def _fingerprint() -> str:
    """Of all code that decides which kernels run."""
    found = hashlib.sha256(f"{torch.__version__} {diffusers.__version__}".encode())
    for root in (Path(mame_sd.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def reckon(
    traces: Traces, name: str, rows: Mapping[str, On], cards: Sequence[Card], launch: float
) -> dict[str, dict[str, Any]]:
    """Kernels, and milliseconds busy and eager by card, of each row of a case."""
    found: dict[str, dict[str, Any]] = {}
    for row, on in rows.items():
        launches, busy, eager = [], {}, {}
        for card in cards:
            asked = card if row in DECIDED else None
            graph, work = (
                traces.of(name, CASES[name], row, on, asked, way) for way in (False, True)
            )
            launches.append(sum(one.launches for one in work))
            busy[card.name], eager[card.name] = (
                1e3 * card.busy(graph),
                1e3 * card.eager(work, launch),
            )
        found[row] = {"launches": launches, "busy_ms": busy, "eager_ms": eager}
    return found


def table(name: str, rows: Mapping[str, Any], cards: Sequence[Card], launch: float) -> str:
    """One case as Markdown, two tables: times as fast as unmerged, busy and eager."""
    plain, lines = rows["unmerged"], [f"### {name}", ""]
    for key, title in (("busy_ms", "busy"), ("eager_ms", f"eager, {launch * 1e6:g} us a launch")):
        heads = " | ".join(card.name.removeprefix("GeForce RTX ") for card in cards)
        lines += [f"| {title} | launches | {heads} |", "|---" * (len(cards) + 2) + "|"]
        for row, found in rows.items():
            least, most = min(found["launches"]), max(found["launches"])
            count = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            cells = [
                (
                    f"{found[key][card.name]:.1f} ms"
                    if row == "unmerged"
                    else f"{plain[key][card.name] / found[key][card.name]:.2f}"
                )
                for card in cards
            ]
            lines.append(f"| {row} | {count} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def summary(found: Mapping[str, Any], cards: Sequence[Card], row: str = "default") -> str:
    """One row of all cases as Markdown: times as fast as unmerged, busy and in brackets eager."""
    heads = " | ".join(card.name.removeprefix("GeForce RTX ") for card in cards)
    lines = [
        f"### {row.capitalize()}, busy (eager)",
        "",
        f"| | {heads} |",
        "|---" * (len(cards) + 1) + "|",
    ]
    for name, rows in found.items():
        busy, eager = (
            [rows["unmerged"][key][card.name] / rows[row][key][card.name] for card in cards]
            for key in ("busy_ms", "eager_ms")
        )
        cells = " | ".join(
            f"{one:.2f} ({other:.2f})" for one, other in zip(busy, eager, strict=True)
        )
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


@torch.no_grad()
def measure(
    case: Case, rows: Mapping[str, On], device: torch.device, rounds: int
) -> dict[str, dict[str, Any]]:
    """Seconds of one forward of a case, by row, interleaved on the device that is there."""
    model = case.build(device).eval().requires_grad_(False)

    def call(inputs: Any) -> Any:
        return model(*inputs[0], **inputs[1])

    times = interleaved(
        dict.fromkeys(rows, call),
        lambda: case.inputs(model),
        rounds,
        device,
        3,
        lambda row: rows[row](model),
    )
    plain = times["unmerged"].median
    return {
        row: {**found.to_dict(), "times_as_fast": plain / found.median}
        for row, found in times.items()
    }


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
    parser.add_argument(
        "--rows", nargs="+", metavar="TEXT", help="rows whose names hold the text; default all"
    )
    parser.add_argument(
        "--launch-us", type=float, default=LAUNCH * 1e6, help="microseconds a launch (default 6)"
    )
    parser.add_argument(
        "--published", action="store_true", help="only the distance to published figures"
    )
    parser.add_argument(
        "--measure", action="store_true", help="time the rows on the CUDA device that is there"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="timed rounds with --measure (default 20)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/gpu"), help="where counts are kept (default out/gpu)"
    )
    args = parser.parse_args(argv)
    cases = _chosen(parser, "--model", args.model, CASES)
    cards = [CARDS[name] for name in _chosen(parser, "--card", args.card, CARDS)]
    every = list(dict.fromkeys(row for name in cases for row in rows_of(CASES[name])))
    chosen = ["unmerged", *_chosen(parser, "--rows", args.rows, every)]
    for option, value in (("--launch-us", args.launch_us), ("--rounds", args.rounds)):
        if not value > 0:
            parser.error(f"{option}: expected a number above 0, got {value:g}")
    if args.measure and not torch.cuda.is_available():
        parser.error(
            "--measure: expected a CUDA device, found none; leave --measure out to reckon"
            " without one"
        )
    rows = {
        name: {row: on for row, on in rows_of(CASES[name]).items() if row in chosen}
        for name in cases
    }
    if args.measure:
        device = torch.device("cuda")
        keep(measured_card(device, torch.cuda.get_device_name(device)), measured_file())
        print(f"kept this card's figures in {measured_file()}", file=sys.stderr, flush=True)
        measured = {name: measure(CASES[name], rows[name], device, args.rounds) for name in cases}
        print(
            json.dumps(
                {
                    "benchmark": "gpu",
                    "measured": True,
                    "machine": machine(device),
                    "cases": measured,
                }
            )
        )
        return
    traces = Traces(args.out)
    found = {}
    if not args.published:
        for name in cases:
            found[name] = reckon(traces, name, rows[name], cards, args.launch_us / 1e6)
            if not args.json:
                print(table(name, found[name], cards, args.launch_us / 1e6), flush=True)
        if not args.json and "default" in chosen:
            print(summary(found, cards))
    if args.json:
        print(json.dumps({"benchmark": "gpu", "measured": False, "note": RECKONED, "cases": found}))
    elif args.published or not (args.model or args.rows or args.card):
        print(published_table(traces))
    if not args.json:
        print(RECKONED)


def _chosen(
    parser: argparse.ArgumentParser,
    option: str,
    texts: Sequence[str] | None,
    names: Mapping[str, Any] | list[str],
) -> list[str]:
    found = [name for text in texts or () for name in named(text, names)]
    for text in texts or ():
        if not named(text, names):
            parser.error(f"{option}: expected a part of one of {', '.join(names)}; got {text!r}")
    return list(dict.fromkeys(found)) if texts else list(names)


if __name__ == "__main__":
    main()
