"""Says what merging would change in each layer of an embedded model, at three of its steps. Also
says what a choice by layer is reckoned to give.

    python -m benchmarks.by_layer --model transformer --speeds 1.14 1.25
    python -m benchmarks.by_layer --model unet --num 2 --speeds 1.32 1.45
    python -m benchmarks.by_layer --more  # thresholds by layer, and means of cells, as forms too

Writes a file of settings for each speed, `layers-SPEED.json`, and a picture of the shares,
`layers.webp`, into --out. With --more it also writes `shares-or-thresholds-SPEED.json`.

Prints the reckoned error of uniform shares and of choices by layer: the sum of the layers' mean
relative squared errors. It also says what a choice for each of the three steps would add. --more
also chooses among thresholds (`tau`) and means of cells. `benchmarks.frontier --settings` checks on
images what is reckoned. Measurements of each prompt are in measured.json: run again to continue.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.generation import generate, load
from benchmarks.instruments import INSTRUMENTS
from mame_sd.diffusion.apply_denoiser import denoiser_of, mame
from mame_sd.diffusion.calibration import (
    FORMS,
    REFERENCE,
    Calibration,
    Call,
    Measured,
    Measurement,
    Option,
    calibration_of,
    calls_of,
    choose,
    in_words,
    measure,
    options,
    some,
)
from mame_sd.diffusion.families.transformers import uniform
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.eval.rivals.layers import rival_on
from mame_sd.eval.rivals.plans import means
from mame_sd.runs.files import write_atomically

SHOWN = {"keep": 0.25, "merge": "qkv"}  # the form whose errors the picture shows
THRESHOLDS = tuple(
    {"tau": tau, "merge": merge}
    for merge in ("qkv", "kv")
    for tau in (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4)
)
CELLS = ((1, 2), (2, 2))


def merging(model: Any) -> AbstractContextManager[MaMeHandle]:
    """Uniform shares on the model for a block, whatever file lies beside it."""
    with mame(model.pipe) as handle:
        config = uniform(denoiser_of(model.pipe), handle.config)
    return mame(model.pipe, config)


def add_means(model: Any, calls: list[Call], found: Measurement) -> None:
    """Takes in the means of cells, measured on the same calls."""
    for cell in CELLS:
        for merge in ("kv", "qkv"):
            with rival_on(model.pipe, partial(means, cell), merge) as handle:
                other = measure(handle, calls, forms=({"keep": 1.0, "merge": merge},))
            number = len(found.forms)
            share = 1 / (cell[0] * cell[1])
            found.forms.append({"keep": share, "merge": merge, "rival": "means"})
            for name, layer in other.layers.items():
                found.layers[name].seconds[number] = layer.seconds[0]
                found.layers[name].errors[number] = layer.errors[0]


def among(found: Measurement, *kinds: str) -> Measurement:
    """What was measured of these kinds of forms: "keep", "tau" and "rival"."""
    kept = {
        number
        for number, form in enumerate(found.forms)
        if ("rival" if "rival" in form else "tau" if "tau" in form else "keep") in kinds
        or form == REFERENCE
    }
    layers = {
        name: Measured(
            layer.unmerged,
            layer.effect,
            {n: layer.seconds[n] for n in layer.seconds if n in kept},
            {n: layer.errors[n] for n in layer.errors if n in kept},
            layer.own,
        )
        for name, layer in found.layers.items()
    }
    return Measurement(found.forms, found.forward, layers)


def measured(
    model: Any, prompts: list[str], steps: int, file: Path, more: bool = False
) -> dict[str, Any]:
    """A measurement of each prompt as JSON values, those that stand in `file` first.

    Raises SystemExit, in one line, where `file` is another version's.
    """
    forms = (*FORMS, *THRESHOLDS) if more else FORMS
    rows = _rows_of(file, forms)
    for seed, prompt in enumerate(prompts):
        if prompt not in rows:
            run = partial(generate, model, [prompt], steps, seed, output="latent")
            with merging(model) as handle:
                calls = some(calls_of(handle, run))
                found = measure(handle, calls, forms=forms)
            if more:
                add_means(model, calls, found)
            rows[prompt] = found.to_dict()
            write_atomically(file, json.dumps(rows).encode())
    return {prompt: rows[prompt] for prompt in prompts}


def _rows_of(file: Path, forms: Sequence[Any]) -> dict[str, Any]:
    """The measurements in `file`, of these forms first; none where there is no file."""
    if not file.exists():
        return {}
    try:
        rows: dict[str, Any] = json.loads(file.read_bytes())
        wanted = json.loads(json.dumps(forms))
        if all(Measurement.from_dict(row).forms[: len(wanted)] == wanted for row in rows.values()):
            return rows
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise SystemExit(
        f"{file}: expected measurements of today's {len(forms)} forms, got others; delete it, or"
        " give another --out"
    )


def at_step(found: Measurement, step: int, steps: int) -> dict[str, list[Option]]:
    """What each layer may do in one of the steps that were measured; seconds are those of all."""
    alone = {
        name: Measured(
            layer.unmerged,
            layer.effect[step::steps],
            layer.seconds,
            {number: errors[step::steps] for number, errors in layer.errors.items()},
            layer.own[step::steps],
        )
        for name, layer in found.layers.items()
    }
    return options(Measurement(found.forms, found.forward, alone))


def words(rule: Any) -> str:
    """A rule as the table has it, also where it is a rival's."""
    return f"means, {in_words(rule)}" if rule and "rival" in rule else in_words(rule)


def sum_of(chosen: dict[Any, Option]) -> float:
    return sum(option.error for option in chosen.values())


def uniform_rows(calibration: Calibration) -> list[tuple[str, float, float]]:
    """(name, speed, error) of each form in all layers that gain by it."""
    rows = []
    for form in FORMS:
        taken = {
            name: next((o for o in found if o.rule == form), found[0])
            for name, found in calibration.options.items()
        }
        rows.append((f"uniform, {in_words(form)}", calibration.reckoned(taken), sum_of(taken)))
    return rows


def picture(
    found: Measurement, calibration: Calibration, speeds: list[float], steps: int, file: Path
) -> None:
    """Errors of one form by layer and step, and the shares that each speed takes."""
    from matplotlib import pyplot as plt
    from PIL import Image

    names = list(found.layers)
    number = FORMS.index(SHOWN)
    errors = np.array(
        [
            [
                np.mean(found.layers[n].errors[number][s::steps])
                * np.mean(found.layers[n].effect[s::steps])
                / np.mean(found.layers[n].errors[FORMS.index(REFERENCE)][s::steps])
                for n in names
            ]
            for s in range(steps)
        ]
    )
    chosen = [calibration.choose(speed) for speed in speeds]
    shares = np.array(
        [[1.0 if c[n].rule is False else c[n].rule["keep"] for n in names] for c in chosen]
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    rows = ["early", "middle", "late"][:steps]
    for axes, values, labels, title in (
        (
            left,
            np.log10(errors),
            rows,
            "error of the output in 1e-6, a quarter of whole tokens in one layer",
        ),
        (
            right,
            shares,
            [f"{s:g} times" for s in speeds],
            "share kept; K: of keys alone, 1: unmerged",
        ),
    ):
        axes.imshow(values, cmap="viridis", aspect="auto")
        axes.set_title(title, fontsize=8)
        axes.set_xticks(range(len(names)), range(len(names)))
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xlabel("layer")
    middle = (np.log10(errors).max() + np.log10(errors).min()) / 2, 0.5
    for row in range(steps):
        for column in range(len(names)):
            dark = np.log10(errors[row, column]) < middle[0]
            left.text(
                column,
                row,
                f"{1e6 * errors[row, column]:.0f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    for row, taken in enumerate(chosen):
        for column, name in enumerate(names):
            rule = taken[name].rule
            text = (
                "1" if rule is False else f"{rule['keep']:g}{' K' if rule['merge'] == 'kv' else ''}"
            )
            right.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=7,
                color="white" if shares[row, column] < middle[1] else "black",
            )
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]
    Image.fromarray(pixels).save(file, quality=85)
    plt.close(figure)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=INSTRUMENTS, default="transformer", help="embedded model"
    )
    parser.add_argument("--num", type=int, default=4, help="prompts (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (default 10)")
    parser.add_argument(
        "--speeds",
        type=float,
        nargs="+",
        default=[1.14, 1.25],
        help="of the denoiser, to choose for",
    )
    parser.add_argument(
        "--more", action="store_true", help="thresholds by layer and means of cells as forms too"
    )
    parser.add_argument("--out", type=Path, help="default out/by-layer-MODEL")
    args = parser.parse_args()
    out = args.out or Path(f"out/by-layer-{args.model}")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    on = INSTRUMENTS[args.model]
    model = load(torch.device("cpu"), torch.float32, on.model)
    file = out / ("measured-more.json" if args.more else "measured.json")
    rows = measured(model, on.prompts(16)[: args.num], args.steps, file, args.more)
    every = Measurement.from_dict(next(iter(rows.values())))
    steps = len(every.forward)
    for row in list(rows.values())[1:]:
        every.add(Measurement.from_dict(row))
    found = among(every, "keep")
    about = {
        "model": on.model,
        "steps": args.steps,
        "guidance": model.guidance,
        "size": list(model.default_size),
        "calibrated_on_prompts": len(rows),
        "found_by": "python -m benchmarks.by_layer",
    }
    with merging(model) as handle:
        calibration = calibration_of(handle, found, about)
    print("| shares | times faster, reckoned | error, reckoned |", "|---|---|---|", sep="\n")
    for name, speed, error in uniform_rows(calibration):
        print(f"| {name} | {speed:.2f} | {error:.1e} |")
    by_step = {(name, s): o for s in range(steps) for name, o in at_step(found, s, steps).items()}
    for speed in args.speeds:
        try:
            chosen = calibration.choose(speed)
        except ValueError as error:
            parser.error(str(error))
        calibration.save(out / f"layers-{speed:g}.json", speed)
        print(f"| **by layer** | {calibration.reckoned(chosen):.2f} | {sum_of(chosen):.1e} |")
        apart = choose(by_step, steps * calibration.forward * (1 - 1 / speed))
        assert apart is not None
        print(f"| by layer, and by step | {speed:.2f} | {sum_of(apart) / steps:.1e} |")
        for kinds in (("tau",), ("keep", "tau"), ("keep", "tau", "rival")) if args.more else ():
            what = options(among(every, *kinds))
            taken = choose(what, calibration.forward * (1 - 1 / speed))
            if taken is not None:
                forms = ", ".join(words(option.rule) for option in taken.values())
                row = f"by layer among {' and '.join(kinds)}: {forms}"
                print(f"| {row} | {speed:.2f} | {sum_of(taken):.1e} |")
            if kinds == ("keep", "tau"):
                both = replace(calibration, options=what)
                both.save(out / f"shares-or-thresholds-{speed:g}.json", speed)
        print(calibration.table(speed).replace("\n", "\n    "))
    picture(found, calibration, args.speeds, steps, out / "layers.webp")
    print(out / "layers.webp")


if __name__ == "__main__":
    main()
