"""The files of each kind of case, and the command that reads them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mame_sd.cli import app
from mame_sd.config import MaMeConfig
from mame_sd.eval.report import render
from mame_sd.eval.results.schema import FORMAT
from scripts.robustness.fuzz.broken import (
    KEYS,
    TEXTS,
    Draw,
    any_value,
    as_json,
    changed,
    damaged,
    place_file,
    remove,
)
from tests.builders.report_example import example
from tests.builders.tiny import save_tiny_pipeline

ROWS = (
    {"prompt": "a red key", "id": "one"},
    {"prompt": "an ant", "seed": 3},
    {"prompt": "x", "note": "kept"},
)
Command = tuple[str, list[str]]  # the program and its arguments


class Cases:
    """What cases are made of, below `work`: a tiny pipeline of random weights, a finished run,
    results of a benchmark.
    """

    def __init__(self, work: Path) -> None:
        self.model = str(save_tiny_pipeline(work / "model"))
        self.results = {"format": FORMAT, **example(work / "benchmark")}
        render(self.results, work / "benchmark")  # matplotlib writes a font list on its first use
        self.prompts = work / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        self.run = work / "finished"
        if app.run(self.generate(self.run, "--prompts", str(self.prompts), "--keep", "0.5")) != 0:
            raise SystemExit("the run that cases are made of failed")

    def generate(self, out: Path, *more: str) -> list[str]:
        """`generate` on the tiny model, into `out`."""
        own = [
            "generate",
            "--model",
            self.model,
            "--device",
            "cpu",
            "--steps",
            "1",
            "--min-tokens",
            "16",
        ]
        return [*own, "--out", str(out), *more]

    def case(self, kind: str, draw: Draw, folder: Path) -> Command:
        """The files of a case in `folder`/given, or in `folder`/out where they are changed, and
        what reads them.
        """
        given, out = folder / "given", folder / "out"
        given.mkdir(parents=True)
        return KINDS[kind](self, draw, given, out)


def prompts(cases: Cases, draw: Draw, given: Path, out: Path) -> Command:
    """A prompt file of any format."""
    ending = draw.choice(("txt", "csv", "tsv", "jsonl", "jsonl"))
    rows: list[Any] = []
    for _ in range(draw.choice((0, 1, 2, 3, 30))):
        row: dict[str, Any] = {"prompt": draw.choice(TEXTS[2:12])}
        if draw.random() < 0.4:
            row |= {"id": f"n{len(rows)}", "seed": len(rows), "width": 32, "height": 32}
        rows.append(changed(draw, row) if draw.random() < 0.15 else row)
    if ending == "txt":
        text = "\n".join(
            str(row.get("prompt", "")) if isinstance(row, dict) else str(row) for row in rows
        )
        data = text.encode("utf-8", "surrogatepass")
    elif ending == "jsonl":
        data = b"\n".join(as_json(draw, row, 0.05) for row in rows)
    else:
        data = _table(draw, "," if ending == "csv" else "\t", len(rows)).encode(
            "utf-8", "surrogatepass"
        )
    path = place_file(draw, given, f"prompts.{ending}", damaged(draw, data))
    return "mame_sd", cases.generate(out, "--prompts", str(path), "--num", "2", "--keep", "0.5")


def _table(draw: Draw, mark: str, rows: int) -> str:
    """A header and `rows` rows of cells with `mark` between."""
    names = draw.sample(KEYS, draw.randrange(1, 6))
    if draw.random() < 0.8:
        names[0] = "prompt"
    lines = [mark.join(names)]
    for _ in range(rows):
        cells = [str(any_value(draw, 3)) if draw.random() < 0.1 else "64" for _ in names]
        cells = [
            '"' + cell.replace('"', '""') + '"' if draw.random() < 0.5 else cell for cell in cells
        ]
        lines.append(mark.join(cells + ["more"] * (draw.random() < 0.05)))
    return "\n".join(lines)


def configs(cases: Cases, draw: Draw, given: Path, out: Path) -> Command:
    """A JSON or TOML file of settings."""
    every = MaMeConfig().to_dict()
    values: Any = draw.choice(
        (
            {"keep": 0.5},
            {"tau": 0.8},
            {"tau": 0.8, "partition": "random"},
            {"keep": 0.5, "references": 0.5},
            {"keep": 0.25, "tile_size": 4, "fit_queries": 8},
            every,
            MaMeConfig(tau=0.5, metric="dot").to_dict(),
        )
    )
    values = dict(values)
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        if draw.random() < 0.1:
            values = changed(draw, values)
        elif isinstance(values, dict):
            values[draw.choice(list(every))] = any_value(draw)
    if draw.random() < 0.6 or not isinstance(values, dict):
        path = place_file(draw, given, "config.json", damaged(draw, as_json(draw, values)))
    else:
        odd = (
            "1979-05-27T07:32:00Z",
            "inf",
            "nan",
            "0x10",
            "[" * 5000,
            "{a=" * 5000,
            "'''",
            "1" * 5000,
            "[[]]",
        )
        lines = [
            f"{k} = {draw.choice(odd) if draw.random() < 0.1 else json.dumps(v)}"
            for k, v in values.items()
        ]
        path = place_file(
            draw,
            given,
            "config.toml",
            damaged(draw, "\n".join(lines).encode("utf-8", "surrogatepass")),
        )
    return "mame_sd", cases.generate(out, "--prompt", "a red key", "--config", str(path))


def results(cases: Cases, draw: Draw, given: Path, out: Path) -> Command:
    """The results of a benchmark, reported."""
    out.mkdir()
    path = place_file(
        draw, out, "results.json", damaged(draw, as_json(draw, changed(draw, cases.results)))
    )
    return "mame_sd.eval", ["report", str(path.parent)]


def folders(cases: Cases, draw: Draw, given: Path, out: Path) -> Command:
    """A finished run to which one or two accidents happened: continued, scored or drawn."""
    (given / "file").write_bytes(b"mine")
    run = out / "run"
    shutil.copytree(cases.run, run)
    for _ in range(draw.choice((1, 1, 2))):
        images = sorted((run / "images").iterdir()) if (run / "images").is_dir() else []
        target = draw.choice([run / "manifest.json", run / "samples.jsonl", *images[:1]])
        ACCIDENTS[draw.randrange(len(ACCIDENTS))](draw, run, target, given)
    pick = draw.randrange(5)
    if pick == 0:
        return "mame_sd", ["sheet", str(run), "--out", str(out / "sheet.png")]
    if pick == 1:
        pair = [str(cases.run), str(run)]
        draw.shuffle(pair)
        options = ["--metrics", "psnr,ssim", "--device", "cpu", "--cache", str(out / "cache")]
        return "mame_sd.eval", ["score", *pair, *options]
    return "mame_sd", cases.generate(run, "--prompts", str(cases.prompts), "--keep", "0.5")


def _manifest(draw: Draw, run: Path, target: Path, outside: Path) -> None:
    path = run / "manifest.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):  # broken by the first accident
        path.write_bytes(damaged(draw, as_json(draw, changed(draw, json.loads(path.read_bytes())))))


def _records(draw: Draw, run: Path, target: Path, outside: Path) -> None:
    path = run / "samples.jsonl"
    with contextlib.suppress(OSError, IndexError):
        lines = path.read_bytes().splitlines()
        place = draw.randrange(len(lines) or 1)
        with contextlib.suppress(ValueError, RecursionError):
            lines[place] = as_json(draw, changed(draw, json.loads(lines[place])))
        path.write_bytes(damaged(draw, b"\n".join(lines) + b"\n"))


def _bytes(draw: Draw, run: Path, target: Path, outside: Path) -> None:
    if target.is_file():
        target.write_bytes(damaged(draw, target.read_bytes()[:4000]))


def _a_folder(draw: Draw, run: Path, target: Path, outside: Path) -> None:
    remove(target)
    target.mkdir()


def _a_link(draw: Draw, run: Path, target: Path, outside: Path) -> None:
    remove(target)
    target.symlink_to(draw.choice((outside / "file", outside / "nowhere", outside, target)))


def _images_elsewhere(draw: Draw, run: Path, target: Path, outside: Path) -> None:
    remove(run / "images")
    (run / "images").symlink_to(draw.choice((outside, outside / "nowhere")))


def _work(draw: Draw, run: Path, target: Path, outside: Path) -> None:
    """What a run that was killed leaves, or a link in its place."""
    work = run / ".mame-sd"
    if draw.random() < 0.4:
        remove(work)
        work.symlink_to(outside)
        return
    if work.is_symlink():
        remove(work)
    work.mkdir(exist_ok=True)
    path = work / draw.choice(
        ("lock", "samples-0.jsonl", "image-0.tmp", "samples.tmp", "samples-x.jsonl")
    )
    remove(path)
    if draw.random() < 0.5:
        path.symlink_to(outside / draw.choice(("file", "nowhere")))
    elif draw.random() < 0.3:
        path.mkdir()
    else:
        path.write_bytes(
            damaged(draw, as_json(draw, {"name": any_value(draw), "levels": any_value(draw)}))
        )


def _foreign(draw: Draw, run: Path, target: Path, outside: Path) -> None:
    """A file gone, another one there."""
    remove(target)
    name = draw.choice(("foreign.txt", "images/extra.png", ".hidden"))
    if (run / "images").is_dir():
        (run / name).write_bytes(b"mine")


ACCIDENTS: tuple[Callable[[Draw, Path, Path, Path], None], ...] = (
    *(_manifest,) * 3,
    *(_records,) * 4,
    _bytes,
    _a_folder,
    _a_link,
    _images_elsewhere,
    _work,
    _foreign,
)
KINDS: dict[str, Callable[[Cases, Draw, Path, Path], Command]] = {
    "prompts": prompts,
    "configs": configs,
    "folders": folders,
    "results": results,
}
