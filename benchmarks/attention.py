"""One self-attention layer, plain and merged: how much of what merging could save arrives.

    python -m benchmarks.attention --short                 # 4,096 tokens, fp32: a minute or two
    python -m benchmarks.attention                         # every size; long on a CPU
    python -m benchmarks.attention --device cuda --dtype bfloat16
    python -m benchmarks.attention --shape flux wan --dtype bfloat16  # layers of transformers
    python -m benchmarks.attention --shape wan --tokens 16384  # a cut of it: fewer frames
    python -m benchmarks.attention --shape flux --block  # with the MLP and all that its block has
    python -m benchmarks.attention --shape wan --cost --tokens 1024 4096 16384  # where it pays

Query, key, value and output projections are counted. *free* is attention on the kept tokens alone,
as if merging and restoring cost nothing; captured = (T_sdpa - T) / (T_sdpa - T_free). "sdpa again"
shows the noise. "global" compares all tokens with all, without tiles. "plan given" merges by a plan
that was made outside of the clock. That is the most that reusing plans over blocks or steps can
win. With --shape the free bound reads the first share of the image's keys, all of them projected.
*attention alone* is the ratio without the time of the layer when its attention gives back its
queries. That time is projections and a block's MLP. The peak is of what a call allocates.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.layers import (
    Layer,
    attention,
    free,
    gate,
    inputs,
    ours,
    planned,
    tau_for,
    tomesd_layer,
)
from benchmarks.shapes import (
    SHAPES,
    WITHOUT,
    Shape,
    cost_rule,
    measure_shape,
    measured_from,
    shape_methods,
    shape_table,
)
from benchmarks.shapes import Layer as ShapeLayer
from benchmarks.timing import Times, captured, interleaved, machine, named
from mame_sd import MaMeConfig
from mame_sd.config import Study

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIGS = {
    "mame+mare .75": MaMeConfig(keep=0.75, merge="qkv"),
    "mame+mare .50": MaMeConfig(keep=0.5, merge="qkv"),
    "mame+mare .25": MaMeConfig(keep=0.25, merge="qkv"),
    "mame kv .50": MaMeConfig(keep=0.5),
    "mame kv .25": MaMeConfig(keep=0.25),
    "mame kv .25, not corrected": MaMeConfig(keep=0.25, study=Study(correct=False)),
    "mame kv .125": MaMeConfig(keep=0.125),
    "global .50": MaMeConfig(
        keep=0.5, preset="plain"
    ),  # alpha = beta = .5 in the paper's cost condition
    "global kv .25": MaMeConfig(keep=0.25, tiles=0),
}
REUSED = "mame kv .25"


def methods(
    dim: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[float, str, Layer]]:
    """(share of tokens kept, name of its free bound, layer) by name."""
    attn, side = attention(dim, device, dtype), math.isqrt(tokens)
    size = (side, side)
    found: dict[str, tuple[float, str, Layer]] = {
        "sdpa": (1.0, "", attn),
        "sdpa again": (1.0, "", attn),
    }
    for share in (0.75, 0.5, 0.25):
        found[f"free {share:.2f}"] = (share, "", free(attn, round(share * tokens), "qkv"))
    for share in (0.5, 0.25, 0.125):
        found[f"free kv {share:.3g}"] = (share, "", free(attn, round(share * tokens), "kv"))
    for ratio in (0.25, 0.5, 0.75):
        try:
            layer = tomesd_layer(attn, ratio, size)
        except ImportError:
            print(
                "note: tomesd is not installed, so it is not measured; pip install mame-sd[rivals]",
                file=sys.stderr,
            )
            break
        found[f"tomesd {ratio:.2f}"] = (1 - ratio, f"free {1 - ratio:.2f}", layer)
    for name, config in CONFIGS.items():
        assert config.keep is not None
        bound = f"free kv {config.keep:.3g}" if config.merge == "kv" else f"free {config.keep:.2f}"
        found[name] = (config.keep, bound, ours(attn, config, size))
        if name == REUSED:
            found[f"{name}, plan given"] = (
                config.keep,
                bound,
                planned(attn, config.replace(correct=False), size),
            )
    half = MaMeConfig(tau=tau_for(0.5, inputs(2, tokens, dim, device, dtype)(), size))
    found["mame tau, half kept"] = (0.5, "free kv 0.5", ours(attn, half, size))
    return found


@torch.no_grad()
def measure(
    case: dict[str, Any], rounds: int, device: torch.device, only: Sequence[str] = ()
) -> dict[str, Any]:
    """One table: prints it and returns its figures."""
    dtype, tokens, dim, batch = DTYPES[case["dtype"]], case["tokens"], case["dim"], case["batch"]
    chosen = methods(dim, tokens, device, dtype)
    if only:
        wanted = {"sdpa", *(name for text in only for name in named(text, chosen))}
        wanted |= {chosen[name][1] for name in wanted}
        chosen = {name: method for name, method in chosen.items() if name in wanted}
    calls = {name: layer for name, (_, _, layer) in chosen.items()}
    times = interleaved(calls, inputs(batch, tokens, dim, device, dtype), rounds, device)
    print(
        f"\nL = {tokens}, d = {dim}, batch {batch}, {case['dtype']}; {rounds} rounds,"
        " milliseconds\n"
    )
    print("| method | kept | median (quartiles) | times faster | captured |\n|---|---|---|---|---|")
    plain, result = times["sdpa"].median, {}
    for name, (kept, bound, _) in chosen.items():
        row = result[name] = _row(kept, times[name], plain, times[bound].median if bound else None)
        share = "" if row["captured"] is None else f"{row['captured']:.2f}"
        print(
            f"| {name} | {kept:.2f} | {times[name]} | {row['times_faster']:.2f} | {share} |",
            flush=True,
        )
    return {**case, "methods": result}


def _row(kept: float, times: Times, plain: float, bound: float | None) -> dict[str, Any]:
    share = None if bound is None else captured(plain, times.median, bound)
    return {
        "kept": kept,
        **times.to_dict(),
        "times_faster": plain / times.median,
        "captured": share,
    }


def measure_shapes(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The tables of `--shape`, or of `--cost` over all cuts: prints them and returns their
    figures.
    """
    results = []
    for name in args.shape:
        published = SHAPES[name] if args.heads is None else replace(SHAPES[name], heads=args.heads)
        for dtype in args.dtype:
            sweep: list[tuple[int, dict[str, Any]]] = []
            for tokens in args.tokens or [None]:
                shape = published if tokens is None else published.cut(tokens)
                layer = ShapeLayer(shape, device, DTYPES[dtype], args.block)
                rows = measure_shape(layer, _chosen(shape, args.only), args.rounds, device)
                del layer
                print(f"\n{shape_table(shape, rows, args.block, dtype)}", flush=True)
                sweep.append((shape.tokens, rows))
                results.append(
                    {
                        "shape": name,
                        "size": shape.size,
                        "dtype": dtype,
                        "block": args.block,
                        "methods": rows,
                    }
                )
            if args.cost:
                print(_cost(sweep))
    return results


def _chosen(shape: Shape, only: Sequence[str]) -> dict[str, Any]:
    """What `--only` names of a shape's methods, sdpa and the bounds with them; all without it."""
    every = shape_methods(shape)
    if not only:
        return every
    wanted = {"sdpa", WITHOUT, *(name for text in only for name in named(text, every))}
    wanted |= {every[name][1] for name in wanted}
    return {name: method for name, method in every.items() if name in wanted}


def _cost(sweep: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """From how many tokens on each share pays, by the paper's cost condition and by the sweep."""
    lines = ["| method | pays by the cost condition from | measured from |", "|---|---|---|"]
    for name in (name for name in sweep[0][1] if name.startswith("mame kv")):
        least, found = (
            cost_rule(MaMeConfig(keep=sweep[0][1][name]["share"])),
            measured_from(sweep, name),
        )
        swept = ", ".join(f"{tokens:,}" for tokens, _ in sweep)
        measured = f"nowhere in {swept}" if found is None else f"{found:,} (of {swept})"
        lines.append(f"| {name} | {math.ceil(least):,} tokens | {measured} |")
    return "\n".join(lines) + "\n"


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    shapes = [(tokens, args.dim) for tokens in args.tokens]
    if not args.short and 4096 in args.tokens and args.dim == 320:
        shapes.append((4096, 640))  # SDXL's first level with attention
    return [
        {"tokens": tokens, "dim": dim, "batch": batch, "dtype": dtype}
        for dtype in args.dtype
        for batch in args.batch
        for tokens, dim in shapes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--short", action="store_true", help="4,096 tokens, batch 2, fp32, three rounds"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        help=(
            "squares (default 1024 4096 9216 16384); with --shape: about so many of the image or"
            " video"
        ),
    )
    parser.add_argument(
        "--dim", type=int, default=320, help="width of a token, a multiple of 64 (default 320)"
    )
    parser.add_argument("--batch", type=int, nargs="+", help="samples (default 2 8)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        help="default float32 bfloat16; on cuda bfloat16 float16",
    )
    parser.add_argument("--rounds", type=int, help="timed rounds (default 7 on a CPU, 50 on cuda)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument(
        "--only",
        metavar="TEXT",
        nargs="+",
        default=(),
        help="the method TEXT, or those whose names hold it, beside sdpa and their bounds",
    )
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, help="layers of published transformers; batch 1"
    )
    parser.add_argument("--block", action="store_true", help="with --shape: whole blocks")
    parser.add_argument(
        "--cost",
        action="store_true",
        help="with --shape and --tokens: from how many tokens on merging pays",
    )
    parser.add_argument(
        "--heads",
        type=int,
        help="with --shape: fewer heads than published, for machines with little memory",
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    if args.shape is None and (args.block or args.cost or args.heads is not None):
        parser.error(
            "--block, --cost, --heads: expected --shape with them; say which, such as --shape flux"
        )
    if args.cost and len(args.tokens or ()) < 2:
        parser.error("--cost: expected several numbers of tokens, such as --tokens 1024 4096 16384")
    if args.shape is not None:
        if min(args.tokens or [4]) < 4 or (args.heads is not None and args.heads < 1):
            parser.error("--tokens, --heads: expected at least 4 tokens and 1 head")
        for text in args.only:
            if not named(text, shape_methods(SHAPES[args.shape[0]])):
                parser.error(
                    f"--only: expected the name of a method or a part of one, got {text!r}; leave"
                    " it out to see all"
                )
        args.dtype = args.dtype or (["bfloat16"] if cuda else ["float32", "bfloat16"])
        args.rounds = args.rounds or (50 if cuda else 5)
        found = measure_shapes(args, device)
        print(json.dumps({"benchmark": "attention", "machine": machine(device), "shapes": found}))
        return
    args.tokens = args.tokens or ([4096] if args.short else [1024, 4096, 9216, 16384])
    args.batch = args.batch or ([2] if args.short else [2, 8])
    args.dtype = args.dtype or (
        ["bfloat16", "float16"] if cuda else ["float32"] if args.short else ["float32", "bfloat16"]
    )
    args.rounds = args.rounds or (50 if cuda else 3 if args.short else 7)
    for tokens in args.tokens:
        if math.isqrt(tokens) ** 2 != tokens:
            parser.error(
                f"--tokens: expected squares, got {tokens}; the next one is"
                f" {(math.isqrt(tokens) + 1) ** 2}"
            )
    if args.dim % 64 or args.dim < 64:
        parser.error(f"--dim: expected a multiple of 64, got {args.dim}; heads are of 64")
    for text in args.only:
        if not named(text, methods(args.dim, 16, device, torch.float32)):
            parser.error(
                f"--only: expected the name of a method or a part of one, got {text!r}; leave it"
                " out to see all"
            )
    errors = {dtype: gate(args.dim, device, DTYPES[dtype], CONFIGS) for dtype in args.dtype}
    print(
        "error against the float64 loops: at most"
        f" {max(max(e.values()) for e in errors.values()):.1e}"
    )
    results = [measure(case, args.rounds, device, args.only) for case in cases(args)]
    print(
        json.dumps(
            {
                "benchmark": "attention",
                "machine": machine(device),
                "errors": errors,
                "cases": results,
            }
        )
    )


if __name__ == "__main__":
    main()
