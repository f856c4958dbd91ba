"""A benchmark of a tiny model: prompts, rows, a suite."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mame_sd.config import MaMeConfig
from mame_sd.eval.benchmark.rows import FLOOR, Row, row_named
from mame_sd.eval.benchmark.run import Benchmark
from mame_sd.eval.benchmark.suites import Suite
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.rivals.tomesd import ToMeSD
from mame_sd.eval.scoring.tools import Tools
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import Merging
from mame_sd.runs.prompt_files import prompts_from_texts

PROMPTS = prompts_from_texts(
    ["key on a black background", "ant on a pink background", "star on a purple background"]
)
SETTINGS = GenerateSettings(steps=2)
KEEP = MaMeConfig(keep=0.5, min_tokens=16)
TAU = MaMeConfig(tau=0.3, min_tokens=16)
LIKE_SDXL = {  # no attention at the largest level
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
rivals = pytest.mark.skipif(
    importlib.util.find_spec("tomesd") is None, reason="tomesd is not installed (extra rivals)"
)


def tiny_rows() -> list[Row]:
    """Return the paper's rows at settings under which a tiny model merges."""
    return [
        Row(name="baseline", label="baseline", family="baseline"),
        Row(name="tomesd-50", label="ToMeSD 50 %", family="tomesd", method=ToMeSD(0.5)),
        Row(name="mame-tau", label="MaMe+MaRe", family="mame", method=Merging(TAU)),
        Row(
            name="mame-default",
            label="MaMe default",
            family="mame",
            method=Merging(KEEP),
            default=True,
        ),
    ]


def tiny(name: str, min_tokens: int = 16) -> Row:
    """Return a rival's row at a setting under which a tiny model merges."""
    row = row_named(name)
    return replace(row, method=replace(row.method, min_tokens=min_tokens))


def every_row() -> list[Row]:
    """Return these, a rival that finds no layer to merge, and mean attention."""
    return [*tiny_rows(), tiny("todo-2", 1024), tiny(FLOOR)]


TINY = Suite(
    name="tiny",
    about="for tests",
    model="tiny",
    prompts=None,
    num=3,
    steps=2,
    rounds=2,
    metrics=("psnr", "ssim", "fid", "is", "latency", "speedup", "memory"),
)


def stage(name: str) -> contextlib.AbstractContextManager[Callable[[int, int], None]]:
    return contextlib.nullcontext(lambda done, total: None)


def benchmark(model: LoadedModel, out: Path, **changes: Any) -> Benchmark:
    values: dict[str, Any] = {
        "suite": TINY,
        "model": model,
        "prompts": PROMPTS,
        "settings": SETTINGS,
        "rows": tiny_rows(),
        "metrics": [METRICS[name] for name in METRICS if name in TINY.metrics],
        "reference": None,
        "out": out,
        "tools": Tools(offline=True),
        "stage": stage,
        "rounds": 2,
    }
    return Benchmark(**{**values, **changes})


def results_of(out: Path) -> dict[str, Any]:
    """Return the content of results.json in `out`."""
    found: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return found


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    """Its rows by name."""
    return {row["name"]: row for row in results_of(out)["rows"]}
