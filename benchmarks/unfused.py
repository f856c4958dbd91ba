"""CPU seconds and memory of whole images where PyTorch has no fused attention kernel.

    OMP_NUM_THREADS=1 python -m benchmarks.unfused --rounds 3

Merging is compared with diffusers' attention slicing, which is exact and cuts the scores into
chunks. `sdpa_kernel(SDPBackend.MATH)` makes PyTorch use the kernel that it uses on devices without
a fused one. The embedded UNet has 4,096 tokens; rows take turns. Memory is what an image takes
above the loaded model, as Linux counts it, each row in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import parser_of
from mame_sd import apply_mame, embedded_pipeline
from mame_sd.eval.tables import markdown_table

# Of each row whether attention is fused, diffusers' slices, and whether keys merge.
ROWS: dict[str, tuple[bool, str, bool]] = {
    "fused": (True, "", False),
    "fused, default": (True, "", True),
    "unfused": (False, "", False),
    "unfused, sliced": (False, "max", False),
    "unfused, default": (False, "", True),
}


@torch.no_grad()
def measure(row: str, steps: int) -> tuple[float, float]:
    """Make one image by a row in this process; return its CPU seconds and its peak of MiB."""
    fused, slices, merged = ROWS[row]
    pipe: Any = embedded_pipeline()
    pipe.set_progress_bar_config(disable=True)
    if slices:
        pipe.enable_attention_slicing(slices)
    if merged:
        apply_mame(pipe)

    def image(steps: int) -> None:
        pipe("panda on a yellow background", num_inference_steps=steps, output_type="latent")

    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        image(1)  # starting up isn't timed
        Path("/proc/self/clear_refs").write_text("5")  # the highest use of memory begins anew
        before, start = _memory("VmRSS"), time.process_time()
        image(steps)
        return time.process_time() - start, _memory("VmHWM") - before


def _memory(name: str) -> float:
    """Read one of Linux's figures of this process's memory, in MiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(rf"^{name}:\s+(\d+) kB$", status, re.M)[0]) / 1024


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="images of each row (default 3)")
    parser.add_argument("--steps", type=int, default=4, help="of an image (default 4)")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row, args.steps)))
        return
    measured: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS}
    for _ in range(args.rounds):
        for row in ROWS:
            command = [sys.executable, "-m", "benchmarks.unfused", "--steps", str(args.steps)]
            done = subprocess.run([*command, "--row", row], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"error: {row}: {(done.stderr.splitlines() or ['failed'])[-1]}")
            measured[row].append(json.loads(done.stdout.splitlines()[-1]))
    cells = []
    for row, pairs in measured.items():
        seconds, memory = (statistics.median(values) for values in zip(*pairs, strict=True))
        cells.append([row, f"{seconds:.2f}", f"{memory:.0f}"])
    print(markdown_table(["", "CPU s an image", "MiB above the model"], cells))


if __name__ == "__main__":
    main()
