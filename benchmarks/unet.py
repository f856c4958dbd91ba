"""Whole UNet forwards, plain and merged: Stable Diffusion 1.5, 2.1, XL (random weights) and the embedded model.

    python -m benchmarks.unet --short                                  # the embedded model and SD 1.5 at 512, fp32
    python -m benchmarks.unet                                          # SD 2.1 at 512 and 768 on a CPU
    python -m benchmarks.unet --device cuda --model sd1.5 sd2.1 sdxl --side 512 768 1024 2048

*free* computes attention on the kept tokens as if merging and restoring cost nothing; captured = (T_plain - T) / (T_plain -
T_free). "plain again" is the noise floor: where a method's gain is below it, there is none. Batch 2 is one guided image.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor2_0

from benchmarks import unets
from benchmarks.rivals import tomesd_on
from benchmarks.timing import Times, captured, interleaved, machine
from mame_sd import MaMeConfig, embedded_model_path, mame

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kv .50": {"keep": 0.5},
    "mame+mare .50": {"keep": 0.5, "merge": "qkv"},
}
On = Callable[[Any], AbstractContextManager[Any]]


class FreeProcessor:
    """Self-attention on the first `share` of the tokens: the bound that no merging can pass. Outputs are repeated."""

    def __init__(self, share: float, merge: str, min_tokens: int) -> None:
        self._share, self._merge, self._min_tokens = share, merge, min_tokens
        self._inner = AttnProcessor2_0()

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: Any = None, **rest: Any) -> Any:
        tokens = hidden_states.shape[1]
        if encoder_hidden_states is not None or tokens < self._min_tokens:
            return self._inner(attn, hidden_states, encoder_hidden_states, **rest)
        kept = hidden_states[:, : round(self._share * tokens)]
        if self._merge == "kv":
            return self._inner(attn, hidden_states, kept, **rest)
        output = self._inner(attn, kept, None, **rest)
        return output.new_empty(hidden_states.shape).copy_(output[:, :1])  # a block needs all rows; one write


@contextmanager
def free_on(unet: Any, config: MaMeConfig) -> Iterator[None]:
    before = dict(unet.attn_processors)
    assert config.keep is not None
    try:
        unet.set_attn_processor(FreeProcessor(config.keep, config.merge, config.min_tokens))
        yield
    finally:
        unet.set_attn_processor(before)


def methods() -> dict[str, tuple[str, On]]:
    """(name of the free bound, how to apply it) by name."""
    found: dict[str, tuple[str, On]] = {"plain": ("", nullcontext), "plain again": ("", nullcontext)}
    for name, fields in SETTINGS.items():
        config = MaMeConfig.from_dict(fields)
        found[f"free {name}"] = ("", partial(free_on, config=config))
        found[name] = (f"free {name}", partial(mame, config=config))
    for ratio in (0.25, 0.5):
        found[f"tomesd {ratio}"] = ("", partial(tomesd_on, ratio=ratio))
    return found


@torch.no_grad()
def measure(unet: Any, side: int, batch: int, rounds: int, only: str | None) -> dict[str, Any]:
    """Figures of every method at one size: prints the table and returns it."""

    def forward(given: dict[str, Any]) -> torch.Tensor:
        rest = {name: value for name, value in given.items() if name != "sample"}
        output: torch.Tensor = unet(given["sample"], **rest).sample  # tomesd reads the size off a positional sample
        return output

    chosen = {n: m for n, m in methods().items() if only is None or only in n or n.startswith("plain")}
    seeds = count()
    for name, (_, on) in list(chosen.items()):
        try:
            with on(unet):
                _gate(name, forward, unets.inputs(unet, side, batch, 0))
        except ImportError as error:
            print(f"note: {name} is not measured: {error}; pip install mame-sd[peers]", file=sys.stderr)
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
    print("| method | median (quartiles), ms | times faster | captured |\n|---|---|---|---|")
    rows = {name: _row(times, name, bound, plain) for name, (bound, _) in chosen.items()}
    for name, row in rows.items():
        share = "" if row["captured"] is None else f"{row['captured']:.2f}"
        print(f"| {name} | {times[name]} | {row['times_faster']:.3f} | {share} |", flush=True)
    noise = abs(1 - times["plain again"].median / plain)
    print(f"\nnoise floor: {noise:.1%}")
    return {"side": side, "batch": batch, "noise": noise, "methods": rows}


def _gate(name: str, forward: Callable[[dict[str, Any]], torch.Tensor], given: dict[str, Any]) -> None:
    """Each method's first forward, which warms it up too, must be finite and of the input's shape."""
    output = forward(given)
    if output.shape != given["sample"].shape or not bool(output.isfinite().all()):
        raise SystemExit(
            f"error: expected a finite output of {list(given['sample'].shape)} from {name}; nothing was timed"
        )


def _row(times: dict[str, Times], name: str, bound: str, plain: float) -> dict[str, Any]:
    median = times[name].median
    share = captured(plain, median, times[bound].median) if bound in times else None
    return {**times[name].to_dict(), "times_faster": plain / median, "captured": share}


def load(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    if model != "embedded":
        return unets.build(model, device, dtype)
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(embedded_model_path(), subfolder="unet").eval().to(device, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the embedded model and SD 1.5 at 512, two rounds")
    parser.add_argument("--model", nargs="+", choices=["embedded", *unets.CONFIGS], help="default sd2.1")
    parser.add_argument("--side", type=int, nargs="+", help="pixels, multiples of 64 (default 512 768)")
    parser.add_argument("--batch", type=int, default=2, help="samples; 2 is one guided image (default 2)")
    parser.add_argument("--dtype", choices=DTYPES, help="default float32; on cuda bfloat16")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 5 on a CPU, 20 on cuda)")
    parser.add_argument("--only", metavar="TEXT", help="methods whose name holds TEXT, beside plain")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    models = args.model or (["embedded", "sd1.5"] if args.short else ["sd2.1"])
    sides = args.side or ([512] if args.short else [512, 768])
    rounds = args.rounds or (20 if cuda else 2 if args.short else 5)
    dtype = DTYPES[args.dtype or ("bfloat16" if cuda else "float32")]
    if any(side % 64 or side < 64 for side in sides):
        parser.error(f"--side: expected multiples of 64 pixels, got {sides}")
    results = []
    for model in models:
        unet = load(model, device, dtype)
        for side in sides:
            print(f"\n{model}, {side} x {side}, batch {args.batch}, {dtype}; {rounds} rounds\n", flush=True)
            results.append({"model": model, "dtype": str(dtype), **measure(unet, side, args.batch, rounds, args.only)})
        del unet
    print(json.dumps({"benchmark": "unet", "machine": machine(device), "cases": results}))


if __name__ == "__main__":
    main()
