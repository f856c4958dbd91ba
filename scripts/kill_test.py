"""Kill `mame-sd generate` on the embedded model at random moments, continue it each time, and compare with an undisturbed run.

    python scripts/kill_test.py [--kills 50] [--kinds baseline,merged,processes] [--steps 2] [--minutes 30]

`processes` is the merged run by two processes, launched by accelerate: a kill takes the launcher and both of them, or one of
them alone. Each kill is a SIGKILL at a random (seeded) moment: after 0 to 2 times what an image takes, once the command has
written a new image. When a run has got to its end it is compared, and the next one begins in a new folder. The kinds share the
kills. Prints one JSON line a kind; exit status 1 when a byte differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.builders.kills import snapshot

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


class Kind:
    """One kind of run: its command, and what an undisturbed one gave."""

    def __init__(self, name: str, work: Path, arguments: argparse.Namespace) -> None:
        self.name = name
        self.work = work / name
        self.options = arguments
        began = time.perf_counter()
        self.status = self.start(self.work / "undisturbed").wait()
        self.expected = snapshot(self.work / "undisturbed")
        self.images = count(self.work / "undisturbed")
        self.per_image = (time.perf_counter() - began) / max(self.images, 1)

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """The command under test, writing to `out`, in a process group of its own."""
        command = [sys.executable, *(LAUNCH if self.name == "processes" else []), "-m", "mame_sd", "generate"]
        command += ["--prompts", "demo", "--num", str(self.options.num), "--steps", str(self.options.steps)]
        command += ["--images-per-prompt", "3", "--batch-size", "2", "--out", str(out)]
        command += ["--baseline"] if self.name == "baseline" else []
        if self.options.model is not None:
            command += ["--model", self.options.model, *([] if self.name == "baseline" else ["--min-tokens", "16"])]
        return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)

    def kill_one(self, out: Path, draw: random.Random) -> bool:
        """Start the run and kill it after its first new image; whether it was still running then."""
        process = self.start(out)
        before = count(out)
        while process.poll() is None and count(out) == before:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 2 * self.per_image))
        if process.poll() is not None:
            return False
        workers = [
            child for child in psutil.Process(process.pid).children(recursive=True) if "generate" in child.cmdline()
        ]
        if workers and draw.random() < 0.5:
            draw.choice(workers).kill()
            process.wait()
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return True

    def compared(self, out: Path) -> list[str]:
        """Continue the run to its end; names of the files that are not those of the undisturbed one."""
        status = self.start(out).wait()
        found = snapshot(out)
        different = sorted(name for name in {*self.expected, *found} if self.expected.get(name) != found.get(name))
        return different if status == 0 else [f"status {status}", *different]


def count(out: Path) -> int:
    images = out / "images"
    return len(os.listdir(images)) if images.exists() else 0


def test(kind: Kind, kills: int, until: float) -> bool:
    """Kill runs of `kind` until there were `kills`, or no time is left; whether all ended with the same bytes."""
    draw = random.Random(kind.name)
    done, runs = 0, 0
    different: list[str] = []
    while done < kills and time.monotonic() < until:
        out = kind.work / f"killed-{runs}"
        runs += 1
        while done < kills and time.monotonic() < until and count(out) < kind.images:
            done += kind.kill_one(out, draw)
            print(f"{kind.name}: {done} of {kills} kills, {count(out)} of {kind.images} images", file=sys.stderr)
        different += kind.compared(out)
    found = {"kind": kind.name, "kills": done, "runs": runs, "images": kind.images, "different": different}
    print(json.dumps({**found, "status": kind.status}), flush=True)
    return kind.status == 0 and not different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills of all kinds together")
    parser.add_argument("--kinds", default="baseline,merged,processes", help="with commas between")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps")
    parser.add_argument("--num", type=int, default=12, help="prompts, three images of each")
    parser.add_argument("--minutes", type=float, default=60, help="begin no kill after this")
    parser.add_argument("--work", type=Path, default=None, help="folder for the runs; a temporary one when left out")
    parser.add_argument("--model", default=None, help="another model than the embedded one")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    began, good = time.monotonic(), True
    with tempfile.TemporaryDirectory() as temporary:
        for number, name in enumerate(kinds):
            kills = arguments.kills * (number + 1) // len(kinds) - arguments.kills * number // len(kinds)
            until = began + 60 * arguments.minutes * (number + 1) / len(kinds)
            good &= test(Kind(name, arguments.work or Path(temporary), arguments), kills, until)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
