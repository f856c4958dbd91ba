"""Results like those of a benchmark, with runs of drawn images, for the tests of the report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mame_sd.eval.results.schema import Column

SIDE = 48
PROMPTS = (
    "red apple",
    "<script>alert(1)</script> & $x_1$ | `code` {{ 7 * 7 }}",
    "blue key",
    '"><img src=x onerror=alert(2)>',
)
NOISE = {
    "tomesd-50": 9.0,
    "mame-tau-0.8": 6.0,
    "mame-default": 3.0,
}  # levels of 255 by which a row's images differ
METRICS = [
    Column(
        name="latency",
        label="Latency",
        unit="s",
        better="lower",
        block="cost",
        digits=2,
        about="Median.",
    ),
    Column(name="memory", label="Peak memory", unit="MiB", better="lower", block="cost", digits=0),
    Column(name="lpips", label="LPIPS (alex)", better="lower", block="fidelity"),
    Column(name="psnr", label="PSNR", unit="dB", better="higher", block="fidelity", digits=1),
    Column(name="retrieval", label="Retrieval", better="higher", block="quality", digits=2),
    Column(
        name="fid",
        label="FID",
        better="lower",
        block="quality",
        digits=2,
        about="Against the reference.",
    ),
]
LATENCY = {
    "baseline": (4.0, 3.9, 4.1),
    "tomesd-50": (3.2, 3.1, 3.3),
    "mame-tau-0.8": (5.0, 4.9, 5.2),
    "mame-default": (2.5, 2.4, 2.6),
}
ROWS = (
    ("baseline", "Baseline", "baseline"),
    ("tomesd-25", "ToMeSD 25 %", "tomesd"),
    ("tomesd-50", "ToMeSD 50 %", "tomesd"),
    ("mame-tau-0.8", "MaMe+MaRe τ 0.8", "mame"),
    ("mame-default", "MaMe (default)", "mame"),
)


def example(folder: Path, side: int = SIDE, prompts: tuple[str, ...] = PROMPTS) -> dict[str, Any]:
    """results.json's content; draws the images of its runs into `folder`.

    Row tomesd-25 is not measured.
    """
    keys = {f"{n:05d}_0": text for n, text in enumerate(prompts, 1)}
    images = {
        name: _draw(folder / "runs" / name / "images", list(keys), side, name)
        for name, *_ in ROWS
        if name != "tomesd-25"
    }
    return {
        "suite": "quick",
        "created": "2026-01-02T03:04:05+00:00",
        "manifest": {
            "sampling": {"steps": 3, "guidance": 1.25},
            "model": {"device": "cpu", "dtype": "float32"},
        },
        "metrics": [asdict(metric) for metric in METRICS],
        "rows": [_row(name, label, family, images) for name, label, family in ROWS],
        "pictures": [{"key": key, "prompt": text, "seed": 42} for key, text in keys.items()],
        "gates": [
            {"name": "baseline against itself", "expected": "equal", "got": "equal", "passed": True}
        ],
        "reference": "drawn glyphs",
        "reference_n": 2160,
        "notes": ["A note <b>that is</b> text."],
    }


def row(results: dict[str, Any], name: str, of: str = "rows") -> dict[str, Any]:
    """The row called `name`; of "metrics" the metric."""
    return next(entry for entry in results[of] if entry["name"] == name)


def _draw(folder: Path, keys: list[str], side: int, name: str) -> dict[str, np.ndarray]:
    """Write one image per key; rows differ from the baseline by `NOISE`, later keys by more.

    Returns the pixels.
    """
    folder.mkdir(parents=True)
    pixels = {}
    for n, key in enumerate(keys):
        y, x = np.mgrid[:side, :side] / side
        base = np.stack([x, y, (x + n / 4) % 1], -1) * 255
        noise = np.random.default_rng(n).normal(size=base.shape) * NOISE.get(name, 0) * (1 + n)
        pixels[key] = np.clip(base + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels[key]).save(folder / f"{key}.png")
    return pixels


def _row(
    name: str, label: str, family: str, images: dict[str, dict[str, np.ndarray]]
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": name,
        "label": label,
        "family": family,
        "default": name == "mame-default",
    }
    entry |= {
        "config": {},
        "run": f"runs/{name}",
        "measured": True,
        "reason": None,
        "per_image": {},
    }
    if name not in images:
        return entry | {
            "measured": False,
            "reason": "tomesd is not installed: pip install 'mame-sd[rivals]'",
            "values": {},
        }
    count = len(images[name])
    mean, low, high = LATENCY[name]
    values: dict[str, Any] = {"latency": {"mean": mean, "low": low, "high": high, "n": 3}}
    values["retrieval"] = {
        "mean": 0.25 + 0.25 * (family == "mame"),
        "low": 0.0,
        "high": 0.75,
        "n": count,
    }
    values["fid"] = {"mean": None, "n": count, "withheld": f"N = {count}, needs 100"}
    if family != "baseline":
        errors = {
            key: float(np.mean((images[name][key] - images["baseline"][key].astype(float)) ** 2))
            for key in images[name]
        }
        entry["per_image"] = {
            "lpips": {key: error / 2000 for key, error in errors.items()},
            "psnr": {key: float(10 * np.log10(255**2 / error)) for key, error in errors.items()},
        }
        for metric, found in entry["per_image"].items():
            numbers = list(found.values())
            values[metric] = {
                "mean": float(np.mean(numbers)),
                "low": min(numbers),
                "high": max(numbers),
                "n": count,
            }
    if family == "mame":
        values["lpips"] |= {"p": 0.031, "against": "tomesd-50"}
    return entry | {"values": values}
