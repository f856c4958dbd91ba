"""Kill runs of the embedded model at random moments, continue each until it ends, and compare with
an undisturbed one.

    python -m scripts.robustness.kill_test [--kills 50] [--steps 2] [--minutes 60]
        [--kinds baseline,merged,processes]
    python -m scripts.robustness.kill_test --fork  # the same, forked from a process with the model

A run is `mame-sd generate` with three images of each prompt, two at once. `processes` is the merged
run by two processes that accelerate launches: a kill takes both, or one of them. `--fork` starts a
run in a process that has loaded the model already, which saves most of a start's work.

Each kill is a SIGKILL. Once the run has written a new image it comes after a random (seeded) 0 to 4
times the time of an image. A run that has ended is compared, and the next one begins in a new
folder. The kinds share the kills. Prints one JSON line a kind; exit status 1 when a byte differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.builders.kills import snapshot

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--main_process_port",
    "0",
]


class Command:
    """A run as a user starts it."""

    def __init__(self, kind: str, out: Path, options: argparse.Namespace) -> None:
        command = [
            sys.executable,
            *(LAUNCH if kind == "processes" else []),
            "-m",
            "mame_sd",
            "generate",
        ]
        command += ["--prompts", "demo", "--num", str(options.num), "--steps", str(options.steps)]
        command += ["--images-per-prompt", "3", "--batch-size", "2", "--out", str(out)]
        command += ["--baseline"] if kind == "baseline" else []
        if options.model is not None:
            command += [
                "--model",
                options.model,
                *([] if kind == "baseline" else ["--min-tokens", "16"]),
            ]
        self.process = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL
        )

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self, draw: random.Random) -> None:
        """The whole group, or one worker of it, whose launcher then ends."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        workers = [child for child in children if "generate" in child.cmdline()]
        if len(workers) > 1 and draw.random() < 0.5:
            draw.choice(workers).kill()
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> int:
        return self.process.wait()


class Forked:
    """The same run in children of this process."""

    def __init__(self, kind: str, out: Path, options: argparse.Namespace) -> None:
        generate = _loaded(options.model)
        count = 2 if kind == "processes" else 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.pids = []
        self.statuses: dict[int, int] = {}
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    place = {
                        "RANK": rank,
                        "WORLD_SIZE": count,
                        "LOCAL_RANK": rank,
                        "MASTER_PORT": port,
                    }
                    os.environ.update(
                        {name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1"
                    )
                    generate(kind, out, options)
                    status = 0
                except BaseException:
                    if options.verbose:
                        traceback.print_exc()
                finally:
                    os._exit(status)
            self.pids.append(pid)

    def running(self) -> bool:
        for pid in self.pids:
            if pid not in self.statuses:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.statuses[pid] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) < len(self.pids)

    def kill(self, draw: random.Random) -> None:
        """All of it, or one process, after which the other ends by itself."""
        alive = [pid for pid in self.pids if pid not in self.statuses]
        for pid in alive if draw.random() < 0.5 else [draw.choice(alive)]:
            os.kill(pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        for pid in self.pids:
            if pid not in self.statuses:
                self.statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return max(abs(status) for status in self.statuses.values())


@functools.cache
def _loaded(name: str | None) -> Callable[[str, Path, argparse.Namespace], None]:
    """`generate` on the model, which is loaded once."""
    import torch

    from mame_sd.config import MaMeConfig
    from mame_sd.runs.generate import generate
    from mame_sd.runs.jobs import GenerateSettings
    from mame_sd.runs.loading import load_model
    from mame_sd.runs.model_files import ModelChoice
    from mame_sd.runs.processes import joined, this_process
    from mame_sd.runs.prompt_files import load_prompts

    torch.set_num_threads(1)  # children of a process with threads can't use them
    model = load_model(ModelChoice(model=name, device="cpu"))

    def run(kind: str, out: Path, options: argparse.Namespace) -> None:
        config = MaMeConfig() if name is None else MaMeConfig(min_tokens=16)
        settings = GenerateSettings(steps=options.steps, images_per_prompt=3, batch_size=2)
        process = this_process()
        with joined(process):
            prompts = load_prompts("demo", options.num)
            generate(
                model,
                prompts,
                settings,
                None if kind == "baseline" else config,
                out,
                process=process,
            )

    return run


class Kind:
    """One kind of run, and what an undisturbed one gave."""

    def __init__(self, name: str, work: Path, options: argparse.Namespace) -> None:
        self.name = name
        self.work = work / name
        self.options = options
        run = self.start(self.work / "undisturbed")
        while run.running() and not count(self.work / "undisturbed"):
            time.sleep(0.005)
        began = time.perf_counter()
        self.status = run.wait()
        self.expected = snapshot(self.work / "undisturbed")
        self.images = count(self.work / "undisturbed")
        self.per_image = (time.perf_counter() - began) / max(self.images, 1)

    def start(self, out: Path) -> Command | Forked:
        return (Forked if self.options.fork else Command)(self.name, out, self.options)

    def kill_one(self, out: Path, draw: random.Random) -> bool:
        """Start the run and kill it after its first new image; whether it was still running
        then.
        """
        run, before = self.start(out), count(out)
        while run.running() and count(out) == before:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 4 * self.per_image))
        if not run.running():
            return False
        run.kill(draw)
        return True

    def compared(self, out: Path) -> list[str]:
        """Continue the run to its end; names of the files that are not those of the undisturbed
        one.
        """
        status = self.start(out).wait()
        found = snapshot(out)
        different = sorted(
            name for name in {*self.expected, *found} if self.expected.get(name) != found.get(name)
        )
        return different if status == 0 else [f"status {status}", *different]


def count(out: Path) -> int:
    images = out / "images"
    return len(os.listdir(images)) if images.exists() else 0


def test(kind: Kind, kills: int, until: float) -> bool:
    """Kill runs of `kind` until there were `kills`, or no time is left; whether all ended with the
    same bytes.
    """
    draw = random.Random(kind.name)
    done, runs = 0, 0
    different: list[str] = []
    while done < kills and time.monotonic() < until:
        out = kind.work / f"killed-{runs}"
        runs += 1
        while done < kills and time.monotonic() < until and count(out) < kind.images:
            done += kind.kill_one(out, draw)
            print(
                f"{kind.name}: {done} of {kills} kills, {count(out)} of {kind.images} images",
                file=sys.stderr,
            )
        different += kind.compared(out)
    found = {
        "kind": kind.name,
        "kills": done,
        "runs": runs,
        "images": kind.images,
        "different": different,
    }
    print(json.dumps({**found, "status": kind.status}), flush=True)
    return kind.status == 0 and not different


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="kills of all kinds together")
    parser.add_argument("--kinds", default="baseline,merged,processes", help="with commas between")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps")
    parser.add_argument("--num", type=int, default=12, help="prompts, three images of each")
    parser.add_argument("--minutes", type=float, default=60, help="begin no kill after this")
    parser.add_argument("--fork", action="store_true", help="load the model once and fork each run")
    parser.add_argument("--verbose", action="store_true", help="show why a forked run ended")
    parser.add_argument(
        "--work", type=Path, default=None, help="folder for the runs; a temporary one when left out"
    )
    parser.add_argument("--model", default=None, help="another model than the embedded one")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    began, good = time.monotonic(), True
    with tempfile.TemporaryDirectory() as temporary:
        for number, name in enumerate(kinds):
            kills = options.kills * (number + 1) // len(kinds) - options.kills * number // len(
                kinds
            )
            until = began + 60 * options.minutes * (number + 1) / len(kinds)
            good &= test(Kind(name, options.work or Path(temporary), options), kills, until)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
