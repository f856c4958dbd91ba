"""Results like those of a benchmark, with runs of drawn images, and a parser of the report."""

from __future__ import annotations

from dataclasses import asdict, fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.results import schema

Results = dict[str, Any]
PROMPTS = (
    "red apple",
    "<script>alert(1)</script> & $x_1$ | `code` {{ 7 * 7 }}",
    "blue key",
    '"><img src=x onerror=alert(2)>',
)
COLUMNS = ("latency", "speedup", "memory", "lpips", "psnr", "clip_score", "fid")
NO_TOMESD = "tomesd is not installed: pip install 'mame-sd[rivals]'"
# name, label, family, seconds, levels of 255 by which its images differ from the baseline's
ROWS = (
    ("baseline", "Baseline", "baseline", 4.0, 0),
    ("tomesd-25", "ToMeSD 25 %", "tomesd", None, 0),
    ("tomesd-50", "ToMeSD 50 %", "tomesd", 3.2, 9),
    ("mame-tau-0.8", "MaMe+MaRe τ 0.8", "mame", 5.0, 6),
    ("mame-default", "MaMe (default)", "mame", 2.5, 3),
)


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of each table by its id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, str] = {}
        self._table: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._table = dict(attrs)["id"]

    def handle_endtag(self, tag: str) -> None:
        self._table = None if tag == "table" else self._table

    def handle_data(self, data: str) -> None:
        if self._table is not None:
            self.tables[self._table] = self.tables.get(self._table, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def example(folder: Path, side: int = 48, prompts: tuple[str, ...] = PROMPTS) -> Results:
    """Return the content of results.json, and draw the images of its runs into `folder`."""
    texts = {f"{n:05d}_0": text for n, text in enumerate(prompts, 1)}
    columns = [asdict(METRICS[name]) for name in COLUMNS]
    baseline = _draw(folder / "runs" / "baseline" / "images", list(texts), side, 0)
    rows = []
    for name, label, family, seconds, noise in ROWS:
        row = {"name": name, "label": label, "family": family, "run": f"runs/{name}"}
        row["default"] = name == "mame-default"
        if seconds is None:
            rows.append({**row, "measured": False, "reason": NO_TOMESD, "values": {}})
            continue
        images = baseline
        if noise:
            images = _draw(folder / "runs" / name / "images", list(texts), side, noise)
        rows.append({**row, **_measured(family, seconds, images, baseline)})
    return {
        "suite": "quick",
        "created": "2026-01-02T03:04:05+00:00",
        "manifest": {
            "sampling": {"steps": 3, "guidance": 1.25},
            "model": {"device": "cpu", "dtype": "float32"},
        },
        "metrics": columns,
        "rows": rows,
        "pictures": [{"key": key, "prompt": text, "seed": 42} for key, text in texts.items()],
        "gates": [{"name": "itself", "expected": "equal", "got": "equal", "passed": True}],
        "reference": "drawn glyphs",
        "reference_n": 2160,
        "notes": ["A note <b>that is</b> text."],
    }


def parsed(results: Results) -> schema.Results:
    """Return the results as a benchmark holds them."""
    columns = {field.name for field in fields(schema.Column)}
    made = {
        "metrics": [
            schema.Column(**{key: one[key] for key in one if key in columns})
            for one in results["metrics"]
        ],
        "rows": [
            schema.MethodResult(
                **{**row, "values": {k: schema.Value(**v) for k, v in row["values"].items()}}
            )
            for row in results["rows"]
        ],
        "pictures": [schema.Picture(**one) for one in results["pictures"]],
        "gates": [schema.Gate(**one) for one in results["gates"]],
    }
    return schema.Results(**{**results, **made})


def row(results: Results, name: str, of: str = "rows") -> dict[str, Any]:
    """Return the row called `name`, or of "metrics" the metric."""
    found: dict[str, Any] = next(entry for entry in results[of] if entry["name"] == name)
    return found


def speed(seconds: float, low: float, high: float) -> dict[str, Any]:
    """Values of a row that takes so many seconds in three rounds, the baseline's being 4."""
    fast = {"mean": 4 / seconds, "low": 4 / high, "high": 4 / low, "n": 3}
    return {"latency": {"mean": seconds, "low": low, "high": high, "n": 3}, "speedup": fast}


def _draw(folder: Path, keys: list[str], side: int, noise: float) -> dict[str, np.ndarray]:
    """Write one image per key, later keys noisier, and give their pixels."""
    folder.mkdir(parents=True)
    pixels = {}
    for n, key in enumerate(keys):
        y, x = np.mgrid[:side, :side] / side
        base = np.stack([x, y, (x + n / 4) % 1], -1) * 255
        apart = np.random.default_rng(n).normal(size=base.shape) * noise * (1 + n)
        pixels[key] = np.clip(base + apart, 0, 255).astype(np.uint8)
        Image.fromarray(pixels[key]).save(folder / f"{key}.png")
    return pixels


def _measured(
    family: str, seconds: float, images: dict[str, np.ndarray], baseline: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Values of a row, those of each image by what it differs from the baseline's."""
    count = len(images)
    values: dict[str, Any] = {
        **speed(seconds, seconds - 0.1, seconds + 0.1),
        "clip_score": {"mean": 25.0, "low": 20.0, "high": 30.0, "n": count},
        "fid": {"mean": None, "n": count, "withheld": f"N = {count}, needs 100"},
    }
    per_image = {}
    if family != "baseline":
        errors = {
            key: float(((pixels - baseline[key].astype(float)) ** 2).mean())
            for key, pixels in images.items()
        }
        per_image = {
            "lpips": {key: error / 2000 for key, error in errors.items()},
            "psnr": {key: float(10 * np.log10(255**2 / error)) for key, error in errors.items()},
        }
        for metric, found in per_image.items():
            low, high = min(found.values()), max(found.values())
            mean = float(np.mean(list(found.values())))
            values[metric] = {"mean": mean, "low": low, "high": high, "n": count}
    if family == "mame":
        values["lpips"] |= {"p": 0.031, "against": "tomesd-50"}
    return {"measured": True, "values": values, "per_image": per_image}
