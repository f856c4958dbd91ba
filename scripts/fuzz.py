"""Give the commands broken prompt files, configs, run folders and results, and see that each ends in exit status 0 or 2.

    python scripts/fuzz.py [--cases 300] [--seed 0] [--kinds prompts,configs,folders,results] [--processes 10]
    python scripts/fuzz.py --kinds prompts --only 17       # one case again, with what it says

A case is drawn from (seed, kind, number) alone. It fails on another status than 0 or 2, a traceback, another number of error
lines than one (none at 0), a line of more than 3,000 characters, an exception that leaves the command, and any file operation
that would change something outside of the case's output folder (an audit hook sees them all, links resolved). Commands run in
this process on a tiny pipeline of random weights; the first `--processes` of each kind run once more as `python -m mame_sd`.
Prints one line of JSON; exit status 1 when a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

Draw = random.Random
LONG = 10 * 2**20
TEXTS = (
    "", " ", "a red key", "ключ", "\u202eyek", "e\u0301", "é", "🦊" * 40, "a\0b", "\ufeffkey", "x\u2028y", "a\x1b[2Jb", "<script>",
    "\udcff", "\ud83d", "../../escape", "/etc/passwd", "..", ".", ".hidden", "C:\\x", "a/b", "con", "nul.txt", "x" * 300, "ﬁ", "K",
    "%s{}$HOME`id`", "-n", "--help", "1e999", "NaN", "a\r\nb", "\t",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    7,
    8,
    64,
    65537,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
    1e-320,
    3.0,
    True,
    False,
)
RAW = (
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "1" * 5000,
    '"\\ud800"',
    '"\\u0000"',
    "[" * 100_000,
    "[" * 700 + "]" * 700,
    '{"a":' * 950 + "1" + "}" * 950,
    '{"a":' * 50_000,
    "1e-999",
    "00",
    "'a'",
)
KEYS = (
    "prompt",
    "caption",
    "id",
    "seed",
    "negative_prompt",
    "width",
    "height",
    "note",
    "",
    "PROMPT",
    "file",
    "\ud800",
    "__class__",
)


def any_value(draw: Draw, depth: int = 0) -> Any:
    """A JSON value of any type."""
    pick = draw.randrange(8 if depth < 3 else 5)
    if pick < 2:
        return draw.choice(TEXTS)
    if pick < 4:
        return draw.choice(NUMBERS)
    if pick == 4:
        return None
    if pick == 5:
        return [any_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if pick == 6:
        return {draw.choice(KEYS): any_value(draw, depth + 1) for _ in range(draw.randrange(4))}
    deep: Any = draw.choice(NUMBERS)
    for _ in range(draw.choice((5, 500))):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    return deep


def as_json(draw: Draw, value: Any, raw: float = 0.1) -> bytes:
    """`value` as JSON text, now and then with a piece that no encoder writes in place of a value."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    if draw.random() < raw:
        mark = json.dumps("MARK")
        holder = dict(value) if isinstance(value, dict) else {"prompt": value}
        holder[draw.choice(list(holder) or ["prompt"])] = "MARK"
        text = json.dumps(holder).replace(mark, draw.choice(RAW), 1)
    return text.encode("utf-8", "surrogatepass")


def changed(draw: Draw, value: Any) -> Any:
    """`value` with one entry, at any depth, removed, added or replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        copy = dict(value)
        action = draw.randrange(8)
        if action == 0:
            del copy[key]
        elif action == 1:
            copy[draw.choice((*KEYS, "surprise"))] = any_value(draw)
        elif action < 5:
            copy[key] = changed(draw, copy[key])
        else:
            copy[key] = any_value(draw)
        return copy
    if isinstance(value, list) and value and draw.random() < 0.7:
        copy = list(value)
        place = draw.randrange(len(copy))
        copy[place] = changed(draw, copy[place])
        return copy[:place] if draw.random() < 0.1 else copy
    return any_value(draw)


def damaged(draw: Draw, data: bytes) -> bytes:
    """`data` after one accident on the way to disk, or none."""
    place = draw.randrange(len(data) + 1)
    return draw.choice(
        (
            *[lambda: data] * 16,
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode("utf-8", "replace").encode("utf-16"),
            lambda: data.decode("utf-8", "replace").encode("utf-16-be"),
            lambda: data.decode("utf-8", "replace").encode("utf-32"),
            lambda: data.decode("utf-8", "replace").encode("latin-1", "replace") + b"\xe9",
            lambda: data[:place] + b"\0" + data[place:],
            lambda: data[:place],
            lambda: data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :],
            lambda: data.replace(b"\n", b"\r\n"),
            lambda: data.replace(b"\n", b"\r"),
            lambda: data[:place] + b"\xed\xa0\x80" + data[place:],
            lambda: data[:place] + b"\xff\xfe" + data[place:],
            lambda: data + draw.randbytes(200),
            lambda: data + b"\n" + data,
            lambda: data[:place] + b"x" * LONG + data[place:],
            lambda: b"\n" * 100_000 + data,
            lambda: b"",
            lambda: draw.randbytes(draw.choice((1, 100, 5000))),
        )
    )()


def place_file(draw: Draw, folder: Path, name: str, data: bytes) -> Path:
    """`data` at `folder`/`name`: as a file mostly, else behind links, as a folder, or not there at all."""
    path = folder / name
    kind = draw.randrange(40)
    if kind == 0:
        path.mkdir(parents=True)
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.symlink_to(folder / "nowhere")
    elif kind == 3:
        (folder / "real").write_bytes(data)
        path.symlink_to(folder / "real")
    elif kind == 4:
        path.symlink_to(folder)
    elif kind == 5:
        path = folder / draw.choice(
            (name + ".bak", name.rpartition(".")[0], name.upper(), "\udcff" + name, "a\nb" + name, "x" * 300 + name)
        )
        with contextlib.suppress(OSError):
            path.write_bytes(data)
    elif kind != 6:
        path.write_bytes(data)
    return path


def prompt_file(draw: Draw, folder: Path) -> Path:
    """A prompt file of any format."""
    ending = draw.choice(("txt", "csv", "tsv", "jsonl", "jsonl"))
    rows: list[dict[str, Any]] = []
    for _ in range(draw.choice((0, 1, 2, 3, 30))):
        row: dict[str, Any] = {"prompt": draw.choice(TEXTS[2:12])}
        if draw.random() < 0.4:
            row |= {"id": f"n{len(rows)}", "seed": len(rows), "width": 32, "height": 32}
        rows.append(changed(draw, row) if draw.random() < 0.15 else row)
    if ending == "txt":
        data = "\n".join(str(row.get("prompt", "")) if isinstance(row, dict) else str(row) for row in rows).encode(
            "utf-8", "surrogatepass"
        )
    elif ending == "jsonl":
        data = b"\n".join(as_json(draw, row, 0.05) for row in rows)
    else:
        mark = "," if ending == "csv" else "\t"
        names = draw.sample(KEYS, draw.randrange(1, 6))
        if draw.random() < 0.8:
            names[0] = "prompt"
        lines = [mark.join(names)]
        for _ in rows:
            cells = [str(any_value(draw, 3)) if draw.random() < 0.1 else "64" for _ in names]
            cells = ['"' + cell.replace('"', '""') + '"' if draw.random() < 0.5 else cell for cell in cells]
            lines.append(mark.join(cells + ["more"] * (draw.random() < 0.05)))
        data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return place_file(draw, folder, f"prompts.{ending}", damaged(draw, data))


def config_file(draw: Draw, folder: Path) -> Path:
    """A JSON or TOML file of settings."""
    from mame_sd.config import MaMeConfig

    base = draw.choice(
        (
            {"keep": 0.5},
            {"tau": 0.8},
            {"tau": 0.8, "preset": "plain"},
            {"keep": 0.5, "mlp": 0.5, "cross": 0.5},
            {"keep": 0.25, "stride": [2, 2], "partition": "grid", "tiles": 4},
            MaMeConfig().to_dict(),
            MaMeConfig(tau=0.5, weights="best", metric="dot").to_dict(),
        )
    )
    names = list(MaMeConfig().to_dict())
    values: Any = dict(base)
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        if draw.random() < 0.1:
            values = changed(draw, values)
        elif isinstance(values, dict):
            values[draw.choice(names)] = any_value(draw)
    if draw.random() < 0.6 or not isinstance(values, dict):
        return place_file(draw, folder, "config.json", damaged(draw, as_json(draw, values)))
    odd = ("1979-05-27T07:32:00Z", "inf", "nan", "0x10", "[" * 5000, "{a=" * 5000, "'''", "1" * 5000, "[[]]")
    lines = [
        f"{name} = {draw.choice(odd) if draw.random() < 0.1 else json.dumps(value)}" for name, value in values.items()
    ]
    return place_file(draw, folder, "config.toml", damaged(draw, "\n".join(lines).encode("utf-8", "surrogatepass")))


def run_folder(draw: Draw, run: Path, outside: Path) -> None:
    """Break one or two things in the finished run `run`; `outside` is what links point to."""
    for _ in range(draw.choice((1, 1, 2))):
        images = sorted((run / "images").iterdir()) if (run / "images").is_dir() else []
        files = [run / "manifest.json", run / "samples.jsonl", *images[:1]]
        target = draw.choice(files)
        action = draw.randrange(13)
        if action < 3 and (run / "manifest.json").is_file():
            with contextlib.suppress(ValueError):
                value = json.loads((run / "manifest.json").read_bytes())
                (run / "manifest.json").write_bytes(damaged(draw, as_json(draw, changed(draw, value))))
        elif action < 7 and (run / "samples.jsonl").is_file():
            lines = (run / "samples.jsonl").read_bytes().splitlines()
            if lines:
                place = draw.randrange(len(lines))
                with contextlib.suppress(ValueError):
                    lines[place] = as_json(draw, changed(draw, json.loads(lines[place])))
                (run / "samples.jsonl").write_bytes(damaged(draw, b"\n".join(lines) + b"\n"))
        elif action == 7 and target.is_file():
            target.write_bytes(damaged(draw, target.read_bytes()[:4000]))
        elif action == 8:
            remove(target)
            target.mkdir()
        elif action == 9:
            remove(target)
            target.symlink_to(draw.choice((outside / "file", outside / "nowhere", outside, target)))
        elif action == 10:
            remove(run / "images")
            (run / "images").symlink_to(draw.choice((outside, outside / "nowhere")))
        elif action == 11:
            work = run / ".mame-sd"
            if draw.random() < 0.4:
                remove(work)
                work.symlink_to(outside)
            else:
                work.mkdir(exist_ok=True)
                name = draw.choice(("lock", "samples-0.jsonl", "image-0.tmp", "samples.tmp", "samples-x.jsonl"))
                remove(work / name)
                if draw.random() < 0.5:
                    (work / name).symlink_to(outside / draw.choice(("file", "nowhere")))
                elif draw.random() < 0.3:
                    (work / name).mkdir()
                else:
                    (work / name).write_bytes(
                        damaged(draw, as_json(draw, {"name": any_value(draw), "levels": any_value(draw)}))
                    )
        else:
            remove(target)
            (run / draw.choice(("foreign.txt", "images/extra.png", ".hidden"))).write_bytes(b"mine") if (
                run / "images"
            ).is_dir() else None


def remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


# Of each event the places of a path and of the descriptor of the folder that it starts in.
PATHS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.truncate": ((0, None),),
}


class Watch:
    """Notes every file operation of this process that would change something outside of `allowed`."""

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, _, flags = arguments
            changing = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if changing and not isinstance(path, int):
                self._look(event, path, follow=not flags & os.O_NOFOLLOW)
        for place, folder in PATHS.get(event, ()):
            self._look(event, arguments[place], -1 if folder is None else arguments[folder], follow=False)

    def _look(self, event: str, path: Any, folder: int = -1, *, follow: bool) -> None:
        """`folder`: descriptor of the folder that `path` starts in. `follow`: opening follows a link at the path's end;
        renaming and removing take the link itself."""
        allowed, self.allowed = self.allowed, None
        try:
            text = os.path.join("." if folder < 0 else os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
            real = (
                os.path.realpath(text)
                if follow
                else os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))
            )
            inside = Path(real) == allowed or Path(real).is_relative_to(allowed)
            if not inside and real != os.devnull and "__pycache__" not in real:
                self.found.append(f"{event} {real}")
        finally:
            self.allowed = allowed

    @contextlib.contextmanager
    def only(self, folder: Path) -> Iterator[list[str]]:
        """In the block changes may be made below `folder` alone; gives the list of others."""
        self.found = []
        self.allowed = folder.resolve()
        try:
            yield self.found
        finally:
            self.allowed = None


class Fuzz:
    """Cases of every kind, and what came of them."""

    def __init__(self, work: Path) -> None:
        from mame_sd.cli import app
        from mame_sd.eval.benchmark.results import FORMAT
        from mame_sd.eval.cli import app as eval_app
        from mame_sd.eval.report import render
        from tests.builders.report_example import example
        from tests.builders.tiny import save_tiny_pipeline

        self.work = work
        self.model = str(save_tiny_pipeline(work / "model"))
        self.programs: dict[str, Callable[[list[str]], int]] = {"mame_sd": app.run, "mame_sd.eval": eval_app.run}
        self.results = {"format": FORMAT, **example(work / "benchmark")}
        render(self.results, work / "benchmark")  # matplotlib writes a font list on its first use
        self.watch = Watch()
        self.run = work / "finished"
        status = app.run(self.arguments(self.run, "--prompts", str(self._prompts()), "--keep", "0.5"))
        if status != 0:
            raise SystemExit("the run that cases are made of failed")

    def _prompts(self) -> Path:
        path = self.work / "prompts.jsonl"
        rows = [{"prompt": "a red key", "id": "one"}, {"prompt": "an ant", "seed": 3}, {"prompt": "x", "note": "kept"}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def arguments(self, out: Path, *more: str) -> list[str]:
        """`generate` on the tiny model, into `out`."""
        own = ["generate", "--model", self.model, "--device", "cpu", "--steps", "1", "--min-tokens", "16"]
        return [*own, "--out", str(out), *more]

    def case(self, kind: str, draw: Draw, folder: Path) -> tuple[str, list[str]]:
        """The files of a case below `folder`, and the program and command line that read them."""
        given, out = folder / "given", folder / "out"
        given.mkdir(parents=True)
        if kind == "prompts":
            return "mame_sd", self.arguments(
                out, "--prompts", str(prompt_file(draw, given)), "--num", "2", "--keep", "0.5"
            )
        if kind == "configs":
            return "mame_sd", self.arguments(out, "--prompt", "a red key", "--config", str(config_file(draw, given)))
        if kind == "results":
            out.mkdir()
            path = place_file(draw, out, "results.json", damaged(draw, as_json(draw, changed(draw, self.results))))
            return "mame_sd.eval", ["report", str(path.parent)]
        (given / "file").write_bytes(b"mine")
        run = out / "run"
        shutil.copytree(self.run, run)
        run_folder(draw, run, given)
        pick = draw.randrange(5)
        if pick == 0:
            return "mame_sd", ["sheet", str(run), "--out", str(out / "sheet.png")]
        if pick == 1:
            pair = [str(self.run), str(run)]
            draw.shuffle(pair)
            return "mame_sd.eval", [
                "score",
                *pair,
                "--metrics",
                "psnr,ssim",
                "--device",
                "cpu",
                "--cache",
                str(out / "cache"),
            ]
        return "mame_sd", self.arguments(run, "--prompts", str(self.work / "prompts.jsonl"), "--keep", "0.5")

    def once(self, kind: str, number: int, seed: int, process: bool) -> tuple[int | None, str, list[str]]:
        """Exit status, stderr and complaints of one case."""
        draw = Draw(f"{seed}-{kind}-{number}")
        folder = self.work / "case"
        shutil.rmtree(folder, ignore_errors=True)
        program, arguments = self.case(kind, draw, folder)
        errors = io.StringIO()
        before = tree(self.work, folder / "out")
        status: int | None = None
        complaints: list[str] = []
        if process:
            command = [sys.executable, "-m", program, *map(os.fsencode, arguments)]
            done = subprocess.run(
                command, cwd=folder / "given", capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
            status, text = done.returncode, done.stderr.decode("utf-8", "replace")
        else:
            with (
                self.watch.only(folder / "out") as strange,
                contextlib.redirect_stderr(errors),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                try:
                    status = self.programs[program](arguments)
                except BaseException:
                    complaints.append(traceback.format_exc())
            text = errors.getvalue()
            complaints += strange
        after = tree(self.work, folder / "out")
        complaints += [f"changed: {path}" for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
        lines = text.splitlines()
        if status not in (0, 2):
            complaints.append(f"status {status}")
        if "Traceback" in text:
            complaints.append("a traceback")
        if [line.startswith("error: ") for line in lines].count(True) != (status != 0):
            complaints.append("not one error line")
        if max(map(len, lines), default=0) > 3000:
            complaints.append("a line of more than 3,000 characters")
        return status, text, complaints


def tree(folder: Path, without: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below `folder`, that below `without` left out."""
    found = {}
    for place, folders, files in os.walk(folder):
        if Path(place) == without.parent:
            folders[:] = [name for name in folders if name != without.name]
        for name in files:
            info = os.lstat(os.path.join(place, name))
            found[os.path.join(place, name)] = info.st_size, info.st_mtime_ns
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="prompts,configs,folders,results", help="with commas between")
    parser.add_argument("--processes", type=int, default=10, help="cases of each kind that also run as a process")
    parser.add_argument("--only", type=int, default=None, help="run this case alone and print what it says")
    parser.add_argument("--show", action="store_true", help="print what every case says")
    parser.add_argument("--work", type=Path, default=None, help="folder for the cases; a temporary one when left out")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        fuzz = Fuzz(work)
        for kind in arguments.kinds.split(","):
            counts[kind] = Counter()
            numbers = range(arguments.cases) if arguments.only is None else [arguments.only]
            for number in numbers:
                for process in (False, True)[: 1 + (number < arguments.processes)]:
                    status, text, complaints = fuzz.once(kind, number, arguments.seed, process)
                    counts[kind][f"{'process ' if process else ''}{status}"] += 1
                    if complaints:
                        failed.append({"kind": kind, "case": number, "process": process, "complaints": complaints})
                    if complaints or arguments.show or arguments.only is not None:
                        print(
                            json.dumps([kind, number, status, text[-600:], [line[-3000:] for line in complaints]]),
                            flush=True,
                        )
                if number % 50 == 49:
                    print(f"{kind}: {number + 1} of {len(numbers)}", file=sys.stderr, flush=True)
    print(json.dumps({"seed": arguments.seed, "status": counts, "failed": len(failed)}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
