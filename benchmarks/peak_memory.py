"""Peak memory of merge + restore, in M x N fp32 buffers: at most three may be alive at once.

Run `python -m benchmarks.peak_memory` (--tokens 9216 --dim 320 --batch 2). It counts what PyTorch
allocates beyond the input (on CUDA by the caching allocator, on a CPU by the profiler's record of
every allocation). It prints a table, then one line of JSON. It exits with status 1 when a global
setting needs more than three buffers. With tiles a buffer is small, and what remains is copies of
the tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mame_sd.config import MaMeConfig
from mame_sd.core.merge import plan_merge

LIMIT = 3.0
SETTINGS: dict[str, dict[str, Any]] = {
    "plain tau 0.8": {"preset": "plain"},
    "tau 0.8": {"tau": 0.8, "preset": "plain", "partition": "grid"},
    "tau 0.8 paper": {"tau": 0.8, "variant": "paper"},
    "tau 0.8 softmax": {"tau": 0.01, "metric": "softmax", "preset": "plain", "partition": "grid"},
    "keep 0.5 global": {"keep": 0.5, "tiles": 0},
    "default": {},
}


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes allocated at once while `work` runs, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    assert record.profiler is not None
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=9216, help="tokens of a square image (default 9216, 96 x 96)"
    )
    parser.add_argument("--dim", type=int, default=320, help="width of a token (default 320)")
    parser.add_argument("--batch", type=int, default=2, help="samples (default 2)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    args = parser.parse_args()
    device, side = torch.device(args.device), math.isqrt(args.tokens)
    if side * side != args.tokens:
        parser.error(
            f"--tokens: expected a square number, got {args.tokens}; the next one is"
            f" {(side + 1) ** 2}"
        )
    x = torch.randn(args.batch, args.tokens, args.dim, device=device) + 2
    result: dict[str, Any] = {
        "tokens": args.tokens,
        "dim": args.dim,
        "batch": args.batch,
        "device": str(device),
    }
    print(f"{'setting':18} {'peak MiB':>9} {'M x N fp32 MiB':>15} {'buffers':>8}")
    failed = False
    for name, fields in SETTINGS.items():
        config = MaMeConfig.from_dict(fields)

        def work(config: MaMeConfig = config) -> None:
            plan = plan_merge(x, config, (side, side))
            plan.restore(plan.merge(x))

        with torch.no_grad():
            plan = plan_merge(x, config, (side, side))  # positions are cached from here on
            buffer = plan.weights.numel() * 4
            del plan
            peak = peak_bytes(work, device)
        buffers = peak / buffer
        failed |= config.tiles == 0 and buffers > LIMIT
        result[name] = {"peak_mib": round(peak / 2**20, 1), "buffers": round(buffers, 2)}
        print(f"{name:18} {peak / 2**20:9.1f} {buffer / 2**20:15.1f} {buffers:8.2f}")
    print(json.dumps({**result, "torch": torch.__version__, "limit": LIMIT, "passed": not failed}))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
