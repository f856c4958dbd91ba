"""Kill `mame-sd generate` ten times on the embedded model, continue it each time, and compare with an undisturbed run.

    python scripts/kill_test.py [--kills 10] [--steps 2] [--work FOLDER]

Each kill is a SIGKILL after a random (seeded) share of the time that an image takes, once the run is under way. Prints one JSON
line; exit status 1 when a byte differs.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.builders.kills import snapshot


def start(out: Path, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """The command under test, writing to `out`."""
    command = [sys.executable, "-m", "mame_sd", "generate", "--prompts", "demo", "--steps", str(arguments.steps)]
    command += ["--images-per-prompt", "3", "--batch-size", "2", "--out", str(out)]
    command += [] if arguments.model is None else ["--model", arguments.model, "--min-tokens", "16"]
    return subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1])


def count(out: Path) -> int:
    images = out / "images"
    return len(os.listdir(images)) if images.exists() else 0


def kill_one(out: Path, arguments: argparse.Namespace, delay: float) -> bool:
    """Start the run, kill it `delay` seconds after its first new image; whether it was still running then."""
    process = start(out, arguments)
    before = count(out)
    while process.poll() is None and count(out) == before:
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kills at most; fewer when the run ends before")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps")
    parser.add_argument("--work", type=Path, default=None, help="folder for both runs; a temporary one when left out")
    parser.add_argument("--model", default=None, help="another model than the embedded one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        undisturbed, killed = work / "undisturbed", work / "killed"
        began = time.perf_counter()
        if start(undisturbed, arguments).wait() != 0:
            return 1
        per_image = (time.perf_counter() - began) / 36
        delays = random.Random(0)
        kills = sum(kill_one(killed, arguments, delays.uniform(0, 2 * per_image)) for _ in range(arguments.kills))
        status = start(killed, arguments).wait()
        expected, found = snapshot(undisturbed), snapshot(killed)
        different = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        print(json.dumps({"kills": kills, "images": count(killed), "status": status, "different": different}))
        return int(bool(different) or status != 0)


if __name__ == "__main__":
    sys.exit(main())
