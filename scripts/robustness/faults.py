"""Disks that fill up, folders that turn read-only, model files that are cut or have one bit
flipped: what a run says and loses.

    python -m scripts.robustness.faults [--bits 40]

Run it as root on Linux, for mount and chattr; parts that may not run say so.

Every run is `mame-sd generate`, in this process, of eight prompts on a tiny pipeline of random
weights. After each fault stderr must hold exactly one error line, and every image of before must be
whole. Once the fault is mended, the same command must end with the bytes of an undisturbed run.
Prints a JSON line a fault; exit status 1 when one of this is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from PIL import Image

from mame_sd.cli import app
from tests.builders.faults import NotPermittedError, at_image, flip, system, tmpfs
from tests.builders.kills import snapshot
from tests.builders.tiny import save_tiny_pipeline

IMAGES = 8


class Faults:
    """An undisturbed run, and runs that meet a fault."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.model = save_tiny_pipeline(work / "model")
        self.good = True
        status, _ = self.generate(work / "undisturbed")
        assert status == 0
        self.expected = snapshot(work / "undisturbed")

    def generate(self, out: Path, model: Path | None = None) -> tuple[int, list[str]]:
        """Exit status and error lines of one run."""
        command = [
            "generate",
            "--model",
            str(model or self.model),
            "--device",
            "cpu",
            "--steps",
            "1",
            "--out",
            str(out),
        ]
        command += [
            "--keep",
            "0.5",
            "--min-tokens",
            "16",
            "--prompt",
            "a red key",
            "--images-per-prompt",
            str(IMAGES),
        ]
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            status = app.run(command)
        lines = errors.getvalue().splitlines()
        return status, [line for line in lines if line.startswith("error: ") or "Traceback" in line]

    def tell(self, fault: str, good: bool, **found: Any) -> None:
        self.good &= good
        print(json.dumps({"fault": fault, "good": good, **found}), flush=True)

    def hit(self, fault: str, out: Path, status: int, mend: Any) -> None:
        """A run into `out` that meets the fault, which `mend` mends, and the run after it."""
        found, lines = self.generate(out)
        whole = [path for path in (out / "images").iterdir() if Image.open(path).load()]
        kept = {path: path.stat().st_mtime_ns for path in whole}
        mend()
        again, _ = self.generate(out)
        untouched = all(path.stat().st_mtime_ns == time for path, time in kept.items())
        same = snapshot(out) == self.expected
        good = (
            found == status
            and len(lines) == 1
            and 0 < len(whole) < IMAGES
            and untouched
            and again == 0
            and same
        )
        self.tell(
            fault, good, status=found, said=lines, images=len(whole), again=again, same_bytes=same
        )


def full_disk(faults: Faults) -> None:
    with tmpfs(faults.work / "small", "28k") as remount:
        faults.hit(
            "the disk full in the middle",
            faults.work / "small" / "run",
            1,
            lambda: remount("size=4m"),
        )


def read_only(faults: Faults) -> None:
    out = faults.work / "frozen"
    at_image(4, out / "images", lambda: system("chattr", "+i", str(out / "images")))
    try:
        faults.hit(
            "images turns immutable in the middle",
            out,
            2,
            lambda: system("chattr", "-i", str(out / "images")),
        )
    finally:
        with contextlib.suppress(NotPermittedError):
            system("chattr", "-i", str(out / "images"))


def read_only_again(faults: Faults) -> None:
    with tmpfs(faults.work / "disk", "4m") as remount:
        out = faults.work / "disk" / "run"
        shutil.copytree(faults.work / "undisturbed", out)
        for path in sorted((out / "images").iterdir())[3:]:
            path.unlink()
        remount("ro")
        faults.hit("the file system read-only between two runs", out, 2, lambda: remount("rw"))


def damaged_models(faults: Faults, bits: int) -> None:
    """Files of the model cut at random places, then single bits flipped."""
    draw = random.Random(0)
    for damage in ("cut", "bit"):
        counts: Counter[str] = Counter()
        strange = []
        for number in range(bits):
            model, out = faults.work / "damaged", faults.work / f"{damage}-{number}"
            shutil.rmtree(model, ignore_errors=True)
            shutil.copytree(faults.model, model)
            path = draw.choice(
                sorted(p for p in model.rglob("*") if p.suffix in (".json", ".safetensors"))
            )
            size = path.stat().st_size
            if damage == "cut":
                os.truncate(path, draw.randrange(size))
            else:
                place = draw.randrange(min(size, 4096) if draw.random() < 0.5 else size)
                flip(path, place, draw.randrange(8))
            status, lines = faults.generate(out, model)
            shutil.rmtree(model)
            shutil.copytree(faults.model, model)
            (out / "manifest.json").exists() or out.mkdir(exist_ok=True)
            again, refused = faults.generate(out, model)
            if (
                status == 0
                # numbers all the same: another model, which must not be continued with the right
                # one
            ):
                good = again == 2 and "model" in refused[0]
                counts["loads, and is another model"] += 1
            else:
                good = len(lines) == 1 and status in (1, 2) and "this is a bug" not in lines[0]
                good &= (
                    again == 0 and images(out) == images(faults.work / "undisturbed")
                    if status == 2
                    else True
                )
                counts[f"status {status}"] += 1
            if not good:
                strange.append([path.name, status, lines, again, refused])
            shutil.rmtree(out, ignore_errors=True)
        name = (
            "a model file cut at a random byte"
            if damage == "cut"
            else "one bit of a model file flipped"
        )
        faults.tell(f"{name}, {bits} times", not strange, **counts, strange=strange)


def images(out: Path) -> list[bytes]:
    return [Image.open(path).tobytes() for path in sorted((out / "images").iterdir())]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=40, help="damaged models of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        faults = Faults(Path(temporary))
        for part in (full_disk, read_only, read_only_again):
            try:
                part(faults)
            except NotPermittedError as error:
                faults.tell(part.__name__, True, skipped=str(error))
        damaged_models(faults, arguments.bits)
    return int(not faults.good)


if __name__ == "__main__":
    sys.exit(main())
