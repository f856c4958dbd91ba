"""How much a layer's error matters at the denoiser's output: by perturbation and by gradient.

    python -m benchmarks.effects --model transformer --num 4 --speeds 1.14 1.2 1.25

Calibration merges one layer alone, runs the denoiser and looks at its output: one forward for each
layer (`mame_sd.diffusion.calibration`). A gradient tells all layers by one forward and `--vectors`
backwards. It takes a random vector v at the output and the gradient of <v, output> at a layer's
output. Times the layer's error, that has the output's squared error as its mean square, to first
order.

Prints both for each layer, their correlation, and what each makes of the choice at each speed: its
error, reckoned by perturbation. A third row perturbs each layer in two calls only, the middle and
the late one of one image. Calibration does so for a model of many layers. Writes the choices into
--out, for `benchmarks.frontier --settings`. Takes the measurements of `benchmarks.by_layer` from
`--measured`, or makes them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.by_layer import measured, merging
from benchmarks.generation import generate, load
from benchmarks.instruments import INSTRUMENTS
from mame_sd.diffusion.calibration import (
    AT,
    REFERENCE,
    Calibration,
    Measurement,
    Merging,
    Single,
    calibration_of,
    calls_of,
    hooks_replaced,
    some,
    tensors_of,
)
from mame_sd.diffusion.hooks import MergeHook
from mame_sd.report import LayerStats


class Recorder(Single):
    """Runs the attention unmerged and keeps its output, and what REFERENCE would change of it."""

    def __init__(self, hook: MergeHook, form: Any, kept: dict[str, list[tuple[Tensor, Tensor]]]):
        super().__init__(hook, form)
        self._kept = kept

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own output."""
        call = self.layer.call(module, forward, args, kwargs)
        whole = call.run()
        stats = LayerStats(self.stats.name)
        with torch.no_grad():
            merged = self.merged(call, self._form, stats)
        if stats.last_reason is None:
            pairs = zip(tensors_of(whole), tensors_of(merged), strict=True)
            self._kept[self.stats.name] = [(y, m - y.detach()) for y, m in pairs]
        return whole


@torch.enable_grad()
def by_gradient(handle: Merging, call: Any, vectors: int, seed: int) -> dict[str, float]:
    """For each layer the relative squared error at the output of a call if REFERENCE merges in it
    alone. It is of first order and estimated with so many random vectors.
    """
    args, kwargs = call
    leaf = (args[0] if args else kwargs["hidden_states"]).clone().requires_grad_()
    args, kwargs = (
        ((leaf, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaf})
    )
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {}
    form = handle.config.replace(layers=None, **REFERENCE)
    with hooks_replaced(handle, lambda hook: Recorder(hook, form, kept)):
        output = tensors_of(handle.root(*args, **kwargs))[0]
    at = [(name, y, error) for name, pairs in kept.items() for y, error in pairs]
    generator = torch.Generator().manual_seed(seed)
    total = dict.fromkeys(kept, 0.0)
    for _ in range(vectors):
        v = torch.randn(output.shape, generator=generator).to(output)
        grads = torch.autograd.grad(
            (output * v).sum(), [y for _, y, _ in at], retain_graph=True, allow_unused=True
        )
        along = dict.fromkeys(kept, 0.0)
        for (name, _, error), grad in zip(at, grads, strict=True):
            along[name] += 0.0 if grad is None else float((grad * error).sum())
        total = {name: total[name] + along[name] ** 2 for name in total}
    power = float(output.detach().square().sum())
    return {name: value / vectors / power for name, value in total.items()}


def ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=INSTRUMENTS, default="transformer")
    parser.add_argument("--num", type=int, default=4, help="prompts (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (default 10)")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.14, 1.2, 1.25])
    parser.add_argument("--vectors", type=int, default=8, help="backwards of a call (default 8)")
    parser.add_argument("--measured", type=Path, help="measured.json of benchmarks.by_layer")
    parser.add_argument("--out", type=Path, help="default out/effects-MODEL")
    args = parser.parse_args()
    out = args.out or Path(f"out/effects-{args.model}")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    on = INSTRUMENTS[args.model]
    model = load(torch.device("cpu"), torch.float32, on.model)
    prompts = on.prompts(16)[: args.num]
    rows = measured(model, prompts, args.steps, args.measured or out / "measured.json")
    found = Measurement()
    for row in rows.values():
        found.add(Measurement.from_dict(row))
    gradients: dict[str, list[float]] = {name: [] for name in found.layers}
    with merging(model) as handle:
        handle.root.requires_grad_(False)
        for seed, prompt in enumerate(prompts):
            run = partial(generate, model, [prompt], args.steps, seed, output="latent")
            with torch.no_grad():
                calls = some(calls_of(handle, run))
            for number, call in enumerate(calls):
                for name, value in by_gradient(handle, call, args.vectors, number).items():
                    gradients[name].append(value)
            print(f"{prompt}: {len(calls)} calls", flush=True)
        two: dict[str, list[float]] = {}  # for the layer's own error in all calls
        for number, (name, layer) in enumerate(found.layers.items()):
            image = number % len(prompts) * len(AT)
            late = slice(image + 1, image + len(AT))
            share = np.mean(layer.effect[late]) / np.mean(layer.own[late])
            two[name] = [float(share * np.mean(layer.own))]
        kinds = {
            "perturbation": {name: layer.effect for name, layer in found.layers.items()},
            "gradient": gradients,
            "perturbation, two calls": two,
        }
        print("| layer |", " | ".join(kinds), "|")
        print("|---" * (len(kinds) + 1), end="|\n")
        for name in found.layers:
            print(f"| {name} |", " | ".join(f"{np.mean(k[name]):.2e}" for k in kinds.values()), "|")
        exact = np.log([np.mean(effect) for effect in kinds["perturbation"].values()])
        for kind, effects in list(kinds.items())[1:]:
            other = np.log([np.mean(effect) for effect in effects.values()])
            each = [
                np.corrcoef(np.log(found.layers[n].effect), np.log(effects[n]))[0, 1]
                for n in found.layers
                if len(effects[n]) == len(found.layers[n].effect)
            ]
            print(
                f"{kind}: correlation with perturbation over layers, of logarithms"
                f" {np.corrcoef(exact, other)[0, 1]:.3f}, of ranks"
                f" {np.corrcoef(ranks(exact), ranks(other))[0, 1]:.3f}"
                + (f"; over a layer's calls {np.mean(each):.3f}" if each else "")
            )
        calibrations: dict[str, Calibration] = {}
        for kind, effects in kinds.items():
            layers = {
                name: replace(layer, effect=list(effects[name]))
                for name, layer in found.layers.items()
            }
            calibrations[kind] = calibration_of(
                handle, replace(found, layers=layers), {"model": on.model, "weighed_by": kind}
            )
    judge = calibrations["perturbation"].options
    print("| weighed by | times faster, reckoned | error, reckoned by perturbation |")
    print("|---|---|---|")
    for speed in args.speeds:
        for kind, calibration in calibrations.items():
            chosen = calibration.choose(speed)
            error = sum(
                next(option.error for option in judge[name] if option.rule == taken.rule)
                for name, taken in chosen.items()
            )
            print(f"| {kind} | {calibration.reckoned(chosen):.2f} | {error:.2e} |")
            words = kind.replace(",", "").replace(" ", "-")
            calibration.save(out / f"{words}-{speed:g}.json", speed)


if __name__ == "__main__":
    main()
