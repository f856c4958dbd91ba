"""Whole UNet forwards, plain and merged: Stable Diffusion 1.5, 2.1, XL (random weights) and the
embedded model.

    python -m benchmarks.unet --short  # the embedded model and SD 1.5 at 512, fp32
    python -m benchmarks.unet          # SD 2.1 at 512 and 768 on a CPU
    # 6 GiB:
    python -m benchmarks.unet --model sdxl --side 1024 --batch 1 --dtype bfloat16 --only default
    python -m benchmarks.unet --device cuda --model sd1.5 sd2.1 sdxl --side 512 768 1024 2048

*free* computes on the kept tokens as if merging and restoring cost nothing; captured = (T_plain -
T) / (T_plain - T_free). *work* is the free bound's share of the plain UNet's multiplications,
whatever the machine. "plain again" is the noise floor: where a method's gain is below it, there is
none. Batch 2 is one guided image. `tomesd` merges the first level unless told otherwise (SDXL has
no attention there). Its max_downsample 2 and 4 are the first two and three.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch

from benchmarks import unets
from benchmarks.free import free_on, work
from benchmarks.timing import Times, captured, interleaved, machine, named
from benchmarks.tomesd import tomesd_on
from mame_sd import MaMeConfig, embedded_model_path, mame

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kv .50": {"keep": 0.5},
    "mame+mare .50": {"keep": 0.5, "merge": "qkv"},
    "default, mlp .75": {"mlp": 0.75},
    "default, mlp .5": {"mlp": 0.5},
}
TOMESD: dict[str, dict[str, Any]] = {
    **{f"tomesd {ratio}": {"ratio": ratio} for ratio in (0.25, 0.5, 0.75)},
    **{
        f"tomesd {ratio}, max_downsample 2": {"ratio": ratio, "max_downsample": 2}
        for ratio in (0.25, 0.5, 0.75)
    },
    "tomesd 0.5, max_downsample 4, mlp": {"ratio": 0.5, "max_downsample": 4, "merge_mlp": True},
}
SHORT = ("default", "kv .50", "mame+mare .50", "tomesd 0.25", "tomesd 0.5")
On = Callable[[Any], AbstractContextManager[Any]]


def methods(only: Sequence[str] = (), short: bool = False) -> dict[str, tuple[str, On]]:
    """(name of the free bound, how to apply it) by name: those that `only` names, else all or the
    short choice.
    """
    found: dict[str, tuple[str, On]] = {
        "plain": ("", nullcontext),
        "plain again": ("", nullcontext),
    }
    for name, fields in SETTINGS.items():
        config = MaMeConfig.from_dict(fields)
        found[f"free {name}"] = ("", partial(free_on, config=config))
        found[name] = (f"free {name}", partial(mame, config=config))
    found.update({name: ("", partial(tomesd_on, **fields)) for name, fields in TOMESD.items()})
    chosen = (
        [name for text in only for name in named(text, found)]
        if only
        else SHORT
        if short
        else list(found)
    )
    wanted = {f"{free}{name}" for name in chosen for free in ("", "free ")}
    return {
        name: method for name, method in found.items() if name.startswith("plain") or name in wanted
    }


@torch.no_grad()
def measure(
    unet: Any, side: int, batch: int, rounds: int, chosen: dict[str, tuple[str, On]]
) -> dict[str, Any]:
    """Figures of the `chosen` methods at one size: prints the table and returns it."""

    def forward(given: dict[str, Any]) -> torch.Tensor:
        rest = {name: value for name, value in given.items() if name != "sample"}
        output: torch.Tensor = unet(
            given["sample"], **rest
        ).sample  # tomesd reads the size off a positional sample
        return output

    chosen, seeds = dict(chosen), count()
    for name, (_, on) in list(chosen.items()):
        try:
            with on(unet):
                _gate(name, forward, unets.inputs(unet, side, batch, 0))
        except ImportError as error:
            print(
                f"note: {name} is not measured: {error}; pip install mame-sd[rivals]",
                file=sys.stderr,
            )
            del chosen[name]
    times = interleaved(
        dict.fromkeys(chosen, forward),
        lambda: unets.inputs(unet, side, batch, next(seeds)),
        rounds,
        unet.device,
        warm_up=0,
        around=lambda name: chosen[name][1](unet),
    )
    plain = times["plain"].median
    shares = work(
        unet, side, batch, {n: MaMeConfig.from_dict(f) for n, f in SETTINGS.items() if n in chosen}
    )
    print(
        "| method | median (quartiles), ms | times faster | captured | work"
        " |\n|---|---|---|---|---|"
    )
    rows = {
        name: {**_row(times, name, bound, plain), "work": shares.get(name)}
        for name, (bound, _) in chosen.items()
    }
    for name, row in rows.items():
        captured, share = (
            "" if row[key] is None else f"{row[key]:.2f}" for key in ("captured", "work")
        )
        print(
            f"| {name} | {times[name]} | {row['times_faster']:.3f} | {captured} | {share} |",
            flush=True,
        )
    noise = abs(1 - times["plain again"].median / plain)
    print(f"\nnoise floor: {noise:.1%}")
    return {"side": side, "batch": batch, "noise": noise, "methods": rows}


def _gate(
    name: str, forward: Callable[[dict[str, Any]], torch.Tensor], given: dict[str, Any]
) -> None:
    """Each method's first forward, which warms it up too, must be finite and of the input's
    shape.
    """
    output = forward(given)
    if output.shape != given["sample"].shape or not bool(output.isfinite().all()):
        raise SystemExit(
            f"error: expected a finite output of {list(given['sample'].shape)} from {name}; nothing"
            " was timed"
        )


def _row(times: dict[str, Times], name: str, bound: str, plain: float) -> dict[str, Any]:
    median = times[name].median
    share = captured(plain, median, times[bound].median) if bound in times else None
    return {**times[name].to_dict(), "times_faster": plain / median, "captured": share}


def load(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    if model != "embedded":
        return unets.build(model, device, dtype)
    from diffusers import UNet2DConditionModel

    return (
        UNet2DConditionModel.from_pretrained(embedded_model_path(), subfolder="unet")
        .eval()
        .to(device, dtype)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--short", action="store_true", help="the embedded model and SD 1.5 at 512, two rounds"
    )
    parser.add_argument(
        "--model", nargs="+", choices=["embedded", *unets.CONFIGS], help="default sd2.1"
    )
    parser.add_argument(
        "--side", type=int, nargs="+", help="pixels, multiples of 64 (default 512 768)"
    )
    parser.add_argument(
        "--batch", type=int, default=2, help="samples; 2 is one guided image (default 2)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default float32; on cuda bfloat16")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 5 on a CPU, 20 on cuda)")
    parser.add_argument(
        "--only",
        metavar="TEXT",
        nargs="+",
        default=(),
        help="the method TEXT, or those whose names hold it, beside plain",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    models = args.model or (["embedded", "sd1.5"] if args.short else ["sd2.1"])
    sides = args.side or ([512] if args.short else [512, 768])
    rounds = args.rounds or (20 if cuda else 2 if args.short else 5)
    dtype = DTYPES[args.dtype or ("bfloat16" if cuda else "float32")]
    for text in args.only:
        if not named(text, methods()):
            parser.error(
                f"--only: expected the name of a method or a part of one, got {text!r}; see"
                " benchmarks/unet.py"
            )
    if any(side % 64 or side < 64 for side in sides):
        parser.error(f"--side: expected multiples of 64 pixels, got {sides}")
    results = []
    for model in models:
        unet = load(model, device, dtype)
        for side in sides:
            print(
                f"\n{model}, {side} x {side}, batch {args.batch}, {dtype}; {rounds} rounds\n",
                flush=True,
            )
            found = measure(unet, side, args.batch, rounds, methods(args.only, args.short))
            results.append({"model": model, "dtype": str(dtype), **found})
        del unet
    print(json.dumps({"benchmark": "unet", "machine": machine(device), "cases": results}))


if __name__ == "__main__":
    main()
