"""What an image costs and what it loses: every setting and every rival on an embedded model.

    python -m benchmarks.frontier  # 16 prompts, 10 steps, every rival; run again to continue
    python -m benchmarks.frontier --short  # 4 prompts, a few settings: minutes
    # on prompts that no default was chosen on:
    python -m benchmarks.frontier --num 64 --held-out
    # where nothing but attention mixes space:
    python -m benchmarks.frontier --model transformer --only default "one step fewer"
    python -m benchmarks.frontier --device cuda --num 64 --steps 25

LPIPS, PSNR and SSIM compare with the image that the unmerged model makes of the same prompt and
seed. Retrieval is the share of images whose nearest subject is the prompted one. Times are of the
denoiser alone, over a whole run of `--steps` steps. Each method's stands beside the unmerged
model's in the same minute, all methods of a command in turns. Writes frontier.md into --out: every
point measured there with the same prompts, steps and rounds on this machine. A line says whether
the model can tell methods apart at all. Files in its points make it resumable. Delete a row's .json
to time it again, and its .npz too to make its images again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import methods
from benchmarks.frontier_report import Point, markdown, verdict
from benchmarks.generation import AttentionWork, clocked, generate, load
from benchmarks.instruments import INSTRUMENTS
from benchmarks.methods import Method
from benchmarks.timing import machine
from mame_sd.diffusion.apply_denoiser import denoiser_of
from mame_sd.eval.benchmark.sensitivity import sensitivity
from mame_sd.eval.metrics.lpips import load_lpips
from mame_sd.eval.metrics.psnr import psnr
from mame_sd.eval.metrics.ssim import ssim
from mame_sd.eval.stats import mean_interval
from mame_sd.eval.timing import interleaved, quartiles
from mame_sd.runs.files import write_atomically, written_whole
from mame_sd.runs.loading import LoadedModel

BATCH = 4
PART = 16  # prompts in one file of images
BASELINE = "baseline"
TIMING_SEED = 1000


class Frontier:
    """The measurement of one model on one machine, kept in the folder `out`.

    Args:
        distance: LPIPS of images [n, 3, H, W] in [0, 1] and those of the unmerged model.
        retrieved: 1.0 when an image uint8 [H, W, 3] shows the subject of its prompt.
        now: seconds that times are taken from.
    """

    def __init__(
        self,
        out: Path,
        model: LoadedModel,
        distance: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        retrieved: Callable[[np.ndarray, str], float],
        prompts: list[str],
        steps: int,
        rounds: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.out, self.model, self.prompts, self.steps, self.rounds = (
            out,
            model,
            prompts,
            steps,
            rounds,
        )
        self.pipe, self.denoiser = model.pipe, denoiser_of(model.pipe)
        self._distance, self._retrieved, self._now = distance, retrieved, now
        about = {
            "prompts": prompts,
            "steps": steps,
            "model": model.identity["sha256"],
            "guidance": model.guidance,
        }
        self._threads: dict[str, Any] = {
            "threads": torch.get_num_threads()
        }  # decide times, not images
        if now is not time.perf_counter:
            self._threads["clock"] = "CPU seconds"
        self._common = {
            **about,
            "dtype": str(self.pipe.dtype),
            "machine": machine(self.pipe.device) | {"threads": None},
        }

    def points(self, chosen: Mapping[str, Method], every: Mapping[str, Method]) -> list[Point]:
        """The baseline, the methods of `chosen`, measured where they were not, and all of `every`
        that were before.

        Raises SystemExit when the baseline does not equal itself.
        """
        self.measure(self.images(chosen))
        points = [
            self.known(name, method)
            for name, method in {BASELINE: methods.baseline(), **every}.items()
        ]
        found = [point for point in points if point is not None]
        if found[0]["lpips"] != 0 or found[0]["work"] != 1:
            raise SystemExit(
                f"error: expected the baseline to equal itself, got {found[0]}; trust none of the"
                " others"
            )
        return found

    def images(self, chosen: Mapping[str, Method]) -> dict[str, Method]:
        """Make the images of the baseline and of `chosen` where they aren't yet: the part that
        other work may share the machine with. All of a few prompts come before the next prompts, so
        that a run that is stopped has as many of each.

        Gives those that have some: without its package a rival has none.
        """
        made = {BASELINE: methods.baseline(), **chosen}
        for first in range(0, len(self.prompts), PART):
            for name, method in list(made.items()):
                try:
                    self._part(name, method, first)
                except ImportError as error:
                    print(
                        f"note: {name} is not measured: {error}; pip install mame-sd[rivals]",
                        file=sys.stderr,
                    )
                    del made[name]
        return made

    def measure(self, wanted: Mapping[str, Method]) -> None:
        """Figures into the files of those of `wanted` that have none, all timed in turns."""
        new = {
            name: method
            for name, method in wanted.items()
            if not self._figures(name, method).exists()
        }
        if not new:
            return
        near = {name: self._nearness(name, method) for name, method in new.items()}
        for name, times in self._times(new).items():
            write_atomically(
                self._figures(name, new[name]), json.dumps({**near[name], **times}).encode()
            )
            print(
                f"{name}: {times['times_faster']:.2f}x, LPIPS {near[name]['lpips']:.4f}",
                file=sys.stderr,
                flush=True,
            )

    def known(self, name: str, method: Method) -> Point | None:
        """The method's figures as measured before with the same prompts, steps and rounds on this
        machine, or None.
        """
        file = self._figures(name, method)
        if not file.exists():
            return None
        return {
            "name": name,
            "family": method.family,
            "settings": method.settings,
            **json.loads(file.read_bytes()),
        }

    def _images(self, name: str, method: Method) -> tuple[np.ndarray, int]:
        """uint8 [n, H, W, 3] and the multiplications of self-attention, of all prompts."""
        parts = [self._part(name, method, first) for first in range(0, len(self.prompts), PART)]
        return np.concatenate([images for images, _ in parts]), sum(work for _, work in parts)

    def _part(self, name: str, method: Method, first: int) -> tuple[np.ndarray, int]:
        """The same of at most PART prompts from `first` on, from the method's file or generated
        now.
        """
        prompts = self.prompts[first : first + PART]
        file = self._file(name, method, {"prompts": prompts, "first": first}, ".npz")
        if not file.exists():
            made = []
            with (
                method.on(self.denoiser),
                AttentionWork(self.pipe.tokenizer.model_max_length) as counted,
            ):
                for start in range(0, len(prompts), BATCH):
                    images = generate(
                        self.model,
                        prompts[start : start + BATCH],
                        self.steps - method.fewer,
                        first + start,
                        **self._size_of(method),
                    )
                    made.append(images if method.side == 1 else _enlarged(images, method.side))
            print(
                f"  {name}: {first + len(prompts)} of {len(self.prompts)}",
                file=sys.stderr,
                flush=True,
            )
            with written_whole(file) as whole:
                np.savez_compressed(whole, images=np.concatenate(made), work=np.array(counted.work))
        with np.load(file) as arrays:
            return arrays["images"], int(arrays["work"])

    def _nearness(self, name: str, method: Method) -> dict[str, Any]:
        """How near the method's images are to the unmerged ones, and its share of their work: from
        its file, or compared now.
        """
        pair = [self._images(*which) for which in ((name, method), (BASELINE, methods.baseline()))]
        (images, work), (plain, plain_work) = pair
        of = [hashlib.sha256(found.tobytes()).hexdigest() for found, _ in pair]
        file = self._file(name, method, {}, ".near")
        near: dict[str, Any] = json.loads(file.read_bytes()) if file.exists() else {}
        if near.get("of") != of:
            near = {**self._compared(images, plain), "work": work / plain_work, "of": of}
            write_atomically(file, json.dumps(near).encode())
        return {what: value for what, value in near.items() if what != "of"}

    def _compared(self, images: np.ndarray, plain: np.ndarray) -> dict[str, Any]:
        a, b = (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 for x in (images, plain))
        hits = [
            self._retrieved(image, prompt)
            for image, prompt in zip(images, self.prompts, strict=True)
        ]
        distances = self._distance(a.to(self.pipe.device), b.to(self.pipe.device)).tolist()
        found = mean_interval(
            {str(i): d for i, d in enumerate(distances)},
            {str(i): str(i) for i in range(len(distances))},
        )
        return {
            "lpips": found["mean"],
            "lpips_interval": None if found["low"] is None else [found["low"], found["high"]],
            "psnr": float(psnr(a, b).clamp(max=100).mean()),
            "ssim": float(ssim(a, b).mean()),
            "retrieval": float(np.mean(hits)),
        }

    def _times(self, wanted: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
        """Gives of each the seconds of the denoiser for one image, and how many times as fast it
        was as the unmerged model beside it.

        `itself` says that of the unmerged model in the same rounds. After a warm-up of two steps
        each.
        """
        plain = methods.baseline()
        on = {**wanted, BASELINE: plain}

        def seconds(method: Method, steps: int) -> float:
            with method.on(self.denoiser), clocked(self.denoiser, self._now) as clock:
                generate(
                    self.model,
                    self.prompts[:1],
                    max(1, steps - method.fewer),
                    TIMING_SEED,
                    output="latent",
                    **self._size_of(method),
                )
            return clock.seconds

        def pair(name: str, number: int) -> dict[str, float]:
            """Seconds of the method and of the unmerged model, which comes last in one round and
            first in the next.
            """
            both = {"ours": on[name], "unmerged": plain}
            return {
                which: seconds(both[which], self.steps)
                for which in sorted(both, reverse=number % 2 == 1)
            }

        rounds = [
            found
            for _, found in interleaved(
                list(on), self.rounds, pair, warm_up=lambda name: seconds(on[name], 2)
            )
        ]
        ratios = {
            name: quartiles([r[name]["unmerged"] / r[name]["ours"] for r in rounds]) for name in on
        }
        return {
            name: {
                "seconds": quartiles([r[name]["ours"] for r in rounds])[1],
                "times_faster": ratios[name][1],
                "quartiles": [ratios[name][0], ratios[name][2]],
                "itself": ratios[BASELINE][1],
            }
            for name in wanted
        }

    def _size_of(self, method: Method) -> dict[str, Any]:
        """Height and width of a method's images, where these are not the model's own."""
        if method.side == 1:
            return {}
        side = round(256 * method.side / 16) * 16
        return {"height": side, "width": side}

    def _figures(self, name: str, method: Method) -> Path:
        return self._file(name, method, {"pairs": self.rounds, **self._threads}, ".json")

    def _file(self, name: str, method: Method, more: dict[str, Any], suffix: str) -> Path:
        """Where a measurement lies: its name holds a digest of all that decides it."""
        about = json.dumps(
            [method.family, method.settings, {**self._common, **more}], sort_keys=True
        )
        digest = hashlib.sha256(about.encode()).hexdigest()[:12]
        slug = "".join(c if c.isalnum() or c == "." else "-" for c in name)
        return self.out / "points" / f"{slug}-{digest}{suffix}"


def _enlarged(images: np.ndarray, side: float) -> np.ndarray:
    """Images [n, h, w, 3] at 1 / side of their side, by bicubic interpolation."""
    size = round(images.shape[1] / side), round(images.shape[2] / side)
    t = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    t = torch.nn.functional.interpolate(t, size, mode="bicubic", antialias=True)
    return t.clamp(0, 255).round().byte().permute(0, 2, 3, 1).numpy()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=INSTRUMENTS, default="unet", help="embedded model (default unet)"
    )
    parser.add_argument("--out", type=Path, help="default out/frontier, out/frontier-transformer")
    parser.add_argument("--short", action="store_true", help="4 prompts, 6 steps, a few settings")
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="other prompts than those that defaults were chosen on",
    )
    parser.add_argument("--num", type=int, help="prompts (default 16)")
    parser.add_argument("--steps", type=int, help="denoising steps (default 10)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed runs of each method (default 5)"
    )
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="times in seconds of the CPU, for a machine that others use too",
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        help="measure these settings alone; rows measured before stay",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default float32, float16 on cuda",
    )
    args = parser.parse_args()
    on = INSTRUMENTS[args.model]
    out = args.out or Path("out/frontier" if args.model == "unet" else f"out/frontier-{args.model}")
    chosen = on.short if args.short else on.methods
    for name in args.only or ():
        if name not in on.methods:
            parser.error(f"--only: expected a setting of benchmarks/methods.py, got {name!r}")
    if args.only:
        chosen = {name: on.methods[name] for name in args.only}
    num, steps = args.num or (4 if args.short else 16), args.steps or (6 if args.short else 10)
    device = torch.device(args.device)
    dtype = args.dtype or ("float32" if device.type == "cpu" else "float16")
    model = load(device, getattr(torch, dtype), on.model)
    prompts = on.prompts(num, args.held_out)
    lpips = load_lpips(device=str(device))
    now = time.process_time if args.cpu_seconds else time.perf_counter
    frontier = Frontier(out, model, lpips, on.truth.retrieved, prompts, steps, args.rounds, now)
    points = frontier.points(chosen, on.methods)
    sensitive = sensitivity(points, methods.MEAN_ATTENTION, on.tomesd)
    text = f"{markdown(points)}\n{sensitive}\n"
    write_atomically(out / "frontier.md", text.encode())
    print(text)
    about = {
        "model": on.model,
        "num": num,
        "steps": steps,
        "dtype": dtype,
        "machine": machine(device),
        "verdict": verdict(points),
        "sensitivity": sensitive,
    }
    print(json.dumps({"benchmark": "frontier", **about, "points": points}))


if __name__ == "__main__":
    main()
