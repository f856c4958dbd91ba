"""Merging measured on transformers trained on photographs: how near its samples and velocities are.

    python -m benchmarks.instruments --conditions 64 --out out/instruments.jsonl
    python -m benchmarks.instruments --conditions 16 --rows mlp-0.125,copied-mlp-0.125 --seconds 3
    python -m benchmarks.instruments --conditions 16 --constants   # bandwidth and ridge of the fit

Each condition is a thumbnail of a photograph that no training saw. Cells are means over conditions:

* dB: PSNR of a row's samples to the unmerged samples of the same noise, for each guidance;
* error: relative error of the velocity in %, at t = .2, .5 and .8 of the unmerged samples;
* flat, textured: dB of the quarter of the conditions whose unmerged samples have the least and the
  most texture;
* times as fast: CPU seconds of unmerged samples by those of the row, interleaved, one thread.

With --out a stopped measurement continues. `eval/instruments/weights` has the weights.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import UserError
from mame_sd.eval.instruments.measure import (
    TIMES,
    decibels,
    samples_of,
    texture,
    velocities_of,
    velocity_errors,
)
from mame_sd.eval.instruments.models import KINDS, WEIGHTS, Instrument, conditions, load_instrument
from mame_sd.eval.instruments.rows import REFERENCE, ROWS, Row, constants_rows
from mame_sd.eval.stats import mean_interval
from mame_sd.eval.tables import markdown_table
from mame_sd.eval.timing import interleaved, seconds_of

Found = dict[str, Any]  # what was measured of a row


class Measurement:
    """Rows of one instrument, compared with its unmerged samples.

    Args:
        instrument: what is measured.
        thumbnails: the conditions [N, T, 3, 8, 8].
        steps: evaluations of the model for a sample.
        guidances: each gives samples of its own.
        batch: samples at once.
    """

    def __init__(
        self,
        instrument: Instrument,
        thumbnails: Tensor,
        steps: int,
        guidances: list[float],
        batch: int,
    ) -> None:
        self.instrument, self.steps, self.guidances = instrument, steps, guidances
        self.device = next(instrument.parameters()).device
        self.parts = list(thumbnails.to(self.device).split(batch))
        self.batch = batch
        self.references = {g: self.samples(ROWS[REFERENCE], g) for g in guidances}
        clean = self.references[guidances[0]]
        self.texture = torch.cat([texture(part) for part in clean]).tolist()
        self.velocities = [self.velocity(ROWS[REFERENCE], i) for i in range(len(self.parts))]

    def samples(self, row: Row, guidance: float) -> list[Tensor]:
        """Return a row's samples, in batches."""
        make = partial(samples_of, row, self.instrument, steps=self.steps, guidance=guidance)
        return [make(part, seed=self.batch * i) for i, part in enumerate(self.parts)]

    def velocity(self, row: Row, part: int) -> list[Tensor]:
        """Return a row's velocities of one batch."""
        clean = self.references[self.guidances[0]][part]
        return velocities_of(row, self.instrument, clean, self.parts[part])

    def measure(self, row: Row) -> Found:
        """Return dB for each guidance and errors of velocities, each for every condition."""
        found: Found = {"db": {}, "error": None}
        for guidance, references in self.references.items():
            pairs = zip(self.samples(row, guidance), references, strict=True)
            parts = [decibels(*pair).tolist() for pair in pairs]
            found["db"][f"{guidance:g}"] = list(chain.from_iterable(parts))
        if not row.fewer and not row.side:
            errors: list[list[float]] = [[] for _ in TIMES]
            for part, references in enumerate(self.velocities):
                of_part = velocity_errors(self.velocity(row, part), references)
                errors = [old + new for old, new in zip(errors, of_part, strict=True)]
            found["error"] = errors
        return found

    def seconds(self, rows: dict[str, Row], rounds: int) -> dict[str, list[float]]:
        """Return seconds of one sample of each row, in interleaved rounds."""
        one = self.parts[0][:1]

        def call(name: str, _: int) -> float:
            make = partial(samples_of, rows[name], self.instrument, one, self.steps)
            return seconds_of(make, self.device)[1]

        found: dict[str, list[float]] = {name: [] for name in rows}
        for _, seconds in interleaved(list(rows), rounds, call):
            for name, value in seconds.items():
                found[name].append(value)
        return found


def mean_cell(values: list[float], scale: float = 1.0) -> str:
    """Return a mean and half of its interval."""
    by_key = {str(i): scale * value for i, value in enumerate(values)}
    found = mean_interval(by_key, {key: key for key in by_key})
    if found["low"] is None:
        return f"{found['mean']:.1f}"
    return f"{found['mean']:.1f} ± {(found['high'] - found['low']) / 2:.1f}"


def table(rows: dict[str, Row], found: dict[str, Found], textures: list[float]) -> str:
    """Return what was found as a table in Markdown."""
    guidances = list(next(iter(found.values()))["db"])
    order = sorted(range(len(textures)), key=textures.__getitem__)
    quarter = max(1, len(order) // 4)
    heads = ["row", *(f"dB, guidance {g}" for g in guidances), "error, %", "flat", "textured"]
    baseline = found.get(REFERENCE, {}).get("seconds")
    lines = []
    for name, one in found.items():
        db = one["db"][guidances[0]]
        halves = (fmean(db[i] for i in part) for part in (order[:quarter], order[-quarter:]))
        errors = " ".join(f"{100 * fmean(e):.1f}" for e in one["error"] or [])
        cells = [rows[name].label, *(mean_cell(one["db"][g]) for g in guidances), errors]
        cells += [f"{value:.1f}" for value in halves]
        if baseline:
            own = one.get("seconds")
            cells.append(f"{median(baseline) / median(own):.2f}" if own else "")
        lines.append(cells)
    return markdown_table([*heads, "times as fast"] if baseline else heads, lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--instrument", choices=KINDS, default="photographs", help="default: photographs")
    add("--weights", type=Path, default=WEIGHTS, help="folder of its weights")
    add("--conditions", type=int, default=16, help="how many, up to 128 (default 16)")
    add("--steps", type=int, default=4, help="of the samples (default 4)")
    add("--guidance", type=float, nargs="+", default=[1.0, 2.0], help="(default 1 and 2)")
    add("--rows", help="names with commas between (default all): " + ", ".join(ROWS))
    add("--constants", action="store_true", help="the fit's bandwidth and ridge in place of rows")
    add("--seconds", type=int, default=0, metavar="ROUNDS", help="time so many rounds")
    add("--batch", type=int, default=8, help="samples at once (default 8)")
    add("--device", default="cpu", help="torch's name of it (default cpu)")
    add("--out", type=Path, help="a file of JSON lines; a stopped measurement continues")
    args = parser.parse_args(arguments)
    rows = constants_rows() if args.constants else ROWS
    if args.instrument == "video":
        rows = {name: row for name, row in rows.items() if not row.side}
    names = args.rows.split(",") if args.rows else list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        parser.error(f"--rows: expected names of {', '.join(rows)}, got {', '.join(unknown)}")
    if not 1 <= args.conditions <= 128 or min(args.steps, args.batch) < 1 or args.seconds < 0:
        parser.error("expected 1 to 128 conditions, and steps, batch and rounds of at least 1")
    args.chosen = {name: rows[name] for name in names if name != REFERENCE}
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    try:
        instrument = load_instrument(args.instrument, args.weights).to(args.device)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    if args.seconds:
        torch.set_num_threads(1)
    given = {
        name: getattr(args, name) for name in ("instrument", "conditions", "steps", "guidance")
    }
    found: dict[str, Found] = {}
    if args.out and args.out.exists():
        lines = map(json.loads, args.out.read_text().splitlines())
        found = {line["row"]: line for line in lines if line.items() >= given.items()}
    thumbnails = conditions(args.instrument)[: args.conditions]
    measurement = Measurement(instrument, thumbnails, args.steps, args.guidance, args.batch)
    for name, row in args.chosen.items():
        if name in found:
            continue
        found[name] = measurement.measure(row)
        print(f"{name}: " + ", ".join(f"{fmean(db):.1f} dB" for db in found[name]["db"].values()))
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps({"row": name, **given, **found[name]}) + "\n")
    shown = {name: found[name] for name in args.chosen}
    rows = {REFERENCE: ROWS[REFERENCE], **args.chosen}
    if args.seconds:
        same = {f"{g:g}": [float("inf")] * args.conditions for g in args.guidance}
        shown = {REFERENCE: {"db": same, "error": None}, **shown}
        for name, seconds in measurement.seconds(rows, args.seconds).items():
            shown[name]["seconds"] = seconds
    print(table(rows, shown, measurement.texture))


if __name__ == "__main__":
    main()
