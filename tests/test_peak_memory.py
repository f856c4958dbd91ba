"""The memory script runs, and global merging keeps to three M x N buffers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_global_merging_keeps_to_three_buffers() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.peak_memory",
        "--tokens",
        "1024",
        "--dim",
        "16",
        "--batch",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, env=None, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["passed"]
    assert all(
        report[name]["buffers"] <= 3 for name in ("plain tau 0.8", "tau 0.8", "keep 0.5 global")
    )
