"""Says what merging would change in each layer of an embedded model, at three of its steps, and
what a choice by layer is reckoned to give.

    python -m benchmarks.by_layer --model transformer --speeds 1.14 1.25
    python -m benchmarks.by_layer --model unet --num 2 --speeds 1.32 1.45

Writes a file of settings for each speed, `layers-SPEED.json`, and a picture of the shares,
`layers.webp`, into --out. Prints the reckoned error (the sum of the layers' mean relative squared
errors) of uniform shares and of choices by layer. It also says what a choice of its own for each of
the three steps would add. What is reckoned is checked on images by `benchmarks.frontier
--settings`. Measurements of each prompt stand in measured.json: run again to continue.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.generation import generate, load
from benchmarks.instruments import INSTRUMENTS
from mame_sd.diffusion.apply_denoiser import apply_mame, denoiser_of
from mame_sd.diffusion.calibration import (
    FORMS,
    REFERENCE,
    Calibration,
    Measured,
    Measurement,
    Option,
    calibration_of,
    calls_of,
    choose,
    in_words,
    measure,
    options,
)
from mame_sd.diffusion.families.transformers import uniform
from mame_sd.runs.files import write_atomically

SHOWN = {"keep": 0.25, "merge": "qkv"}  # the form whose errors the picture shows


def measured(model: Any, handle: Any, prompts: list[str], steps: int, file: Path) -> dict[str, Any]:
    """A measurement of each prompt as JSON values, those that stand in `file` first."""
    rows: dict[str, Any] = json.loads(file.read_bytes()) if file.exists() else {}
    for seed, prompt in enumerate(prompts):
        if prompt not in rows:
            run = partial(generate, model, [prompt], steps, seed, output="latent")
            rows[prompt] = measure(handle, calls_of(handle, run)).to_dict()
            write_atomically(file, json.dumps(rows).encode())
    return {prompt: rows[prompt] for prompt in prompts}


def at_step(found: Measurement, step: int, steps: int) -> dict[str, list[Option]]:
    """What each layer may do in one of the steps that were measured; seconds are those of all."""
    alone = {
        name: Measured(
            layer.whole,
            layer.effect[step::steps],
            layer.seconds,
            {number: errors[step::steps] for number, errors in layer.errors.items()},
        )
        for name, layer in found.layers.items()
    }
    return options(alone)


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
                / np.mean(found.layers[n].errors[REFERENCE][s::steps])
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
    parser.add_argument("--out", type=Path, help="default out/by-layer-MODEL")
    args = parser.parse_args()
    out = args.out or Path(f"out/by-layer-{args.model}")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    on = INSTRUMENTS[args.model]
    model = load(torch.device("cpu"), torch.float32, on.model)
    handle = apply_mame(model.pipe, uniform(denoiser_of(model.pipe), apply_mame(model.pipe).config))
    rows = measured(model, handle, on.prompts(16)[: args.num], args.steps, out / "measured.json")
    found, steps = Measurement(), 0
    for row in rows.values():
        found.add(one := Measurement.from_dict(row))
        steps = len(one.forward)
    about = {
        "model": on.model,
        "steps": args.steps,
        "guidance": model.guidance,
        "size": list(model.default_size),
        "calibrated_on_prompts": len(rows),
        "found_by": "python -m benchmarks.by_layer",
    }
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
        print(calibration.table(speed).replace("\n", "\n    "))
    picture(found, calibration, args.speeds, steps, out / "layers.webp")
    print(out / "layers.webp")


if __name__ == "__main__":
    main()
