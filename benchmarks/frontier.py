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
model's in the same minute, all methods of a command in turns. Every figure is kept in --out, so a
stopped command continues, and the table has every row measured there in the same way. A line says
whether the model can tell methods apart at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import methods
from benchmarks.methods import Method
from mame_sd.diffusion.apply_denoiser import denoiser_of
from mame_sd.eval.benchmark.sensitivity import sensitivity
from mame_sd.eval.metrics.lpips import load_lpips
from mame_sd.eval.metrics.psnr import psnr
from mame_sd.eval.metrics.ssim import ssim
from mame_sd.eval.scoring.retrieval import TRUTHS, Truth
from mame_sd.eval.stats import mean_interval
from mame_sd.eval.store import Store
from mame_sd.eval.tables import markdown_table
from mame_sd.eval.timing import interleaved, quartiles, synchronize
from mame_sd.runs.generate import environment_on
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice

BATCH = 4
BASELINE = "baseline"
TIMING_SEED = 1000
FORMAT = "mame-sd frontier 1"
APART = 0.05  # how far the unmerged model may be from its own speed
HEADS = ("setting", "times faster", "LPIPS", "PSNR, dB", "SSIM", "retrieval")
Point = dict[str, Any]


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
        self.model, self.prompts, self.steps, self.rounds = model, prompts, steps, rounds
        self.pipe, self.denoiser = model.pipe, denoiser_of(model.pipe)
        self._distance, self._retrieved, self._now = distance, retrieved, now
        about = {
            "prompts": prompts,
            "steps": steps,
            "rounds": rounds,
            "model": model.identity["sha256"],
            "guidance": model.guidance,
            "dtype": str(self.pipe.dtype),
            "machine": environment_on(self.pipe.device),
            "clock": now.__name__,
        }
        digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
        keys = ("name", "settings", "figures")
        self._store = Store(out / f"points-{digest}.jsonl", FORMAT, "points", about, keys)

    @torch.no_grad()
    def points(self, chosen: Mapping[str, Method], every: Mapping[str, Method]) -> list[Point]:
        """The baseline, the methods of `chosen`, measured where they were not, and all of `every`
        that were before.

        Raises SystemExit when the baseline does not equal itself.
        """
        wanted = {BASELINE: methods.baseline(), **chosen}
        self._compare(wanted)
        self._time(wanted)
        found = []
        for name, method in {BASELINE: methods.baseline(), **every}.items():
            parts = self._known(name, method, "nearness"), self._known(name, method, "times")
            if all(parts):
                found.append({"name": name, "settings": method.settings, **parts[0], **parts[1]})
        if found[0]["lpips"] != 0:
            raise SystemExit(
                f"error: expected the baseline to equal itself, got {found[0]}; trust none of the"
                " others"
            )
        return found

    def _known(self, name: str, method: Method, figures: str) -> dict[str, Any]:
        """Figures that were measured before; none: empty."""
        line = self._store.found.get((name, _text(method.settings), figures), {})
        return {
            key: value for key, value in line.items() if key not in ("name", "settings", "figures")
        }

    def _keep(self, name: str, method: Method, figures: str, found: Mapping[str, Any]) -> None:
        settings = _text(method.settings)
        self._store.add({"name": name, "settings": settings, "figures": figures, **found})

    def _compare(self, wanted: dict[str, Method]) -> None:
        """How near the images of each method are to the unmerged ones. Takes out of `wanted` what
        can't be measured: a rival without its package.
        """
        plain: np.ndarray | None = None
        for name, method in list(wanted.items()):
            if self._known(name, method, "nearness"):
                continue
            try:
                plain = self._images(methods.baseline()) if plain is None else plain
                found = self._nearness(self._images(method), plain)
            except ImportError as error:
                note = f"note: {name} is not measured: {error}; pip install mame-sd[rivals]"
                print(note, file=sys.stderr)
                del wanted[name]
                continue
            self._keep(name, method, "nearness", found)
            print(f"{name}: LPIPS {found['lpips']:.4f}", file=sys.stderr, flush=True)

    def _images(self, method: Method) -> np.ndarray:
        """uint8 [n, H, W, 3] of all prompts."""
        made = []
        with method.on(self.denoiser):
            for first in range(0, len(self.prompts), BATCH):
                prompts = self.prompts[first : first + BATCH]
                images = self._generate(method, prompts, self.steps, first)
                made.append(np.rint(images * 255).astype(np.uint8))
        images = np.concatenate(made)
        return images if method.side == 1 else _enlarged(images, method.side)

    def _generate(
        self, method: Method, prompts: list[str], steps: int, seed: int, output: str = "np"
    ) -> np.ndarray:
        """One image a prompt in [0, 1], [n, H, W, 3], seeds counted from `seed`."""
        generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
        side = round(256 * method.side / 16) * 16
        return self.pipe(
            prompts,
            num_inference_steps=max(1, steps - method.fewer),
            guidance_scale=self.model.guidance,
            generator=generators,
            output_type=output,
            **({} if method.side == 1 else {"height": side, "width": side}),
        ).images

    def _nearness(self, images: np.ndarray, plain: np.ndarray) -> dict[str, Any]:
        a, b = (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 for x in (images, plain))
        hits = map(self._retrieved, images, self.prompts)
        distances = self._distance(a.to(self.pipe.device), b.to(self.pipe.device)).tolist()
        keys = [str(number) for number in range(len(distances))]
        found = mean_interval(dict(zip(keys, distances, strict=True)), {key: key for key in keys})
        return {
            "lpips": found["mean"],
            "lpips_interval": None if found["low"] is None else [found["low"], found["high"]],
            "psnr": float(psnr(a, b).clamp(max=100).mean()),
            "ssim": float(ssim(a, b).mean()),
            "retrieval": float(np.mean(list(hits))),
        }

    def _time(self, wanted: Mapping[str, Method]) -> None:
        """Seconds of the denoiser for one image of each method, and how many times as fast it was
        as the unmerged model beside it; `itself`: the unmerged model in the same rounds.
        """
        new = {n: method for n, method in wanted.items() if not self._known(n, method, "times")}
        if not new:
            return
        plain = methods.baseline()
        on = {**new, BASELINE: plain}

        def seconds(method: Method, steps: int) -> float:
            with method.on(self.denoiser), clocked(self.denoiser, self._now) as passed:
                self._generate(method, self.prompts[:1], steps, TIMING_SEED, "latent")
            return sum(passed)

        def pair(name: str, number: int) -> dict[str, float]:
            """Of the method and of the unmerged model, which comes last in one round and first in
            the next.
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
        for name, method in new.items():
            low, median, high = ratios[name]
            found = {
                "seconds": quartiles([r[name]["ours"] for r in rounds])[1],
                "times_faster": median,
                "quartiles": [low, high],
                "itself": ratios[BASELINE][1],
            }
            self._keep(name, method, "times", found)


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


@contextmanager
def clocked(module: torch.nn.Module, now: Callable[[], float]) -> Iterator[list[float]]:
    """Collects the seconds of every forward of `module` in the block, as `now` counts them."""
    device = next(module.parameters()).device
    began: list[float] = []
    passed: list[float] = []

    def start(*_: Any) -> None:
        synchronize(device)
        began.append(now())

    def stop(*_: Any) -> None:
        synchronize(device)
        passed.append(now() - began.pop())

    handles = [module.register_forward_pre_hook(start), module.register_forward_hook(stop)]
    try:
        yield passed
    finally:
        for handle in handles:
            handle.remove()


def _enlarged(images: np.ndarray, side: float) -> np.ndarray:
    """Images [n, h, w, 3] at 1 / side of their side, by bicubic interpolation."""
    size = round(images.shape[1] / side), round(images.shape[2] / side)
    t = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    t = torch.nn.functional.interpolate(t, size, mode="bicubic", antialias=True)
    return t.clamp(0, 255).round().byte().permute(0, 2, 3, 1).numpy()


def table(points: Iterable[Point]) -> str:
    """The points as Markdown, the fastest last, and a warning where rows were timed while the
    unmerged model was not as fast as itself.
    """
    rows = [
        [
            point["name"],
            f"{point['times_faster']:.2f}",
            f"{point['lpips']:.5f}",
            f"{point['psnr']:.1f}",
            f"{point['ssim']:.4f}",
            f"{point['retrieval']:.2f}",
        ]
        for point in sorted(points, key=lambda point: point["times_faster"])
    ]
    text = f"{markdown_table(HEADS, rows)}\n"
    off = {p["name"]: p["itself"] for p in points if abs(p["itself"] - 1) > APART}
    if not off:
        return text
    return (
        f"{text}\n**Not to be trusted: timed while the unmerged model was {min(off.values()):.2f}"
        f" to {max(off.values()):.2f} times as fast as itself ({', '.join(off)}). Measure again"
        " into another --out on a quiet machine, or with more --rounds.**\n"
    )


def prompts_of(truth: Truth, num: int, held_out: bool) -> list[str]:
    """`num` drawn prompts, half of them pairs that training never saw; with `held_out` others than
    the search for defaults had.
    """
    searched = [prompt.text for prompt in truth.draw(num)]
    if not held_out:
        return searched
    return [prompt.text for prompt in truth.draw(num, 1, without=searched)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=TRUTHS, default="unet", help="embedded model (default unet)"
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
    every = methods.UNET if args.model == "unet" else methods.RIVALS
    for name in args.only or ():
        if name not in every:
            parser.error(f"--only: expected a setting of benchmarks/methods.py, got {name!r}")
    names = args.only or (methods.SHORT if args.short else every)
    num, steps = args.num or (4 if args.short else 16), args.steps or (6 if args.short else 10)
    out = args.out or Path("out/frontier" if args.model == "unet" else f"out/frontier-{args.model}")
    dtype = args.dtype or ("float32" if args.device == "cpu" else "float16")
    choice = ModelChoice(model=f"embedded-{args.model}", device=args.device, dtype=dtype)
    truth, model, lpips = TRUTHS[args.model], load_model(choice), load_lpips(device=args.device)
    now = time.process_time if args.cpu_seconds else time.perf_counter
    prompts = prompts_of(truth, num, args.held_out)
    frontier = Frontier(out, model, lpips, truth.retrieved, prompts, steps, args.rounds, now)
    points = frontier.points({name: every[name] for name in names}, every)
    rival = "tomesd 0.5" if args.model == "unet" else "tau 0.8"
    sensitive = sensitivity(points, methods.MEAN_ATTENTION, rival)
    print(f"{table(points)}\n{sensitive}")
    machine = environment_on(model.pipe.device)
    about = {"model": args.model, "num": num, "steps": steps, "dtype": dtype, "machine": machine}
    print(json.dumps({"benchmark": "frontier", **about, "points": points}))


if __name__ == "__main__":
    main()
