"""What an image costs and what it loses: every setting, tomesd and the trivial rivals on the embedded model.

    python -m benchmarks.frontier --short                       # 4 prompts, a few settings: minutes
    python -m benchmarks.frontier                               # 16 prompts, 10 steps; run again to continue
    python -m benchmarks.frontier --device cuda --num 64 --steps 25

LPIPS, PSNR and SSIM compare with the image that the unmerged model paints of the same prompt and seed; retrieval is the
share of images whose nearest glyph is the prompted one. Times are of the UNet alone, over a whole run of `--steps` steps,
each method beside the baseline. Writes frontier.md and frontier.png into --out; one file for each measured point makes it
resumable: delete a file to measure its point again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mame_sd.eval.metrics.lpips import load_lpips
from mame_sd.eval.metrics.psnr import psnr
from mame_sd.eval.metrics.ssim import ssim
from mame_sd.eval.scoring.retrieval import draw_prompts, retrieved
from mame_sd.eval.timing import interleaved, quartiles

from benchmarks import methods
from benchmarks.frontier_report import markdown, plot, verdict
from benchmarks.methods import Method
from benchmarks.painting import AttentionWork, clocked, load, paint
from benchmarks.timing import machine
from mame_sd import embedded_model_path

BATCH = 4
TIMING_SEED = 1000


class Frontier:
    """The measurement of one model on one machine, kept in the folder `out`."""

    def __init__(self, out: Path, device: torch.device, num: int, steps: int, rounds: int) -> None:
        self.out, self.device, self.steps, self.rounds = out, device, steps, rounds
        self.pipe = load(device, torch.float32 if device.type == "cpu" else torch.float16)
        self.prompts = [prompt.text for prompt in draw_prompts(num)]
        self.lpips = load_lpips(device=str(device))
        self._common = {"prompts": self.prompts, "steps": steps, "model": _model_digest(), "machine": machine(device)}

    def point(self, name: str, method: Method) -> dict[str, Any]:
        """The method's figures: from its file, else measured now."""
        images, work = self._images(name, method)
        plain, plain_work = self._images("baseline", methods.baseline())
        file = self._file(name, method, {"rounds": self.rounds}, ".json")
        if not file.exists():
            figures = {**self._quality(images, plain), "work": work / plain_work, **self._times(method)}
            _write(file, json.dumps(figures).encode())
        found: dict[str, Any] = json.loads(file.read_bytes())
        return {"name": name, "family": method.family, "settings": method.settings, **found}

    def _images(self, name: str, method: Method) -> tuple[np.ndarray, int]:
        """uint8 [n, H, W, 3] and the multiplications of self-attention, from the method's file or painted now."""
        file = self._file(name, method, {}, ".npz")
        if not file.exists():
            painted = []
            with method.on(self.pipe.unet), AttentionWork(self.pipe.tokenizer.model_max_length) as counted:
                for first in range(0, len(self.prompts), BATCH):
                    painted.append(paint(self.pipe, self.prompts[first : first + BATCH], self.steps, first))
                    print(f"  {name}: {first + len(painted[-1])} of {len(self.prompts)}", end="\r", file=sys.stderr)
            _write_arrays(file, images=np.concatenate(painted), work=np.array(counted.work))
        with np.load(file) as arrays:
            return arrays["images"], int(arrays["work"])

    def _quality(self, images: np.ndarray, plain: np.ndarray) -> dict[str, float]:
        a, b = (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 for x in (images, plain))
        hits = [retrieved(image, prompt) for image, prompt in zip(images, self.prompts, strict=True)]
        return {
            "lpips": float(self.lpips(a.to(self.device), b.to(self.device)).mean()),
            "psnr": float(psnr(a, b).clamp(max=100).mean()),
            "ssim": float(ssim(a, b).mean()),
            "retrieval": float(np.mean(hits)),
        }

    def _times(self, method: Method) -> dict[str, Any]:
        """Seconds of the UNet for one image, beside the baseline's in the same rounds, after a warm-up of two steps."""
        on = {"plain": methods.baseline().on, "method": method.on}

        def call(which: str, number: int = -1) -> float:
            with on[which](self.pipe.unet), clocked(self.pipe.unet) as clock:
                paint(self.pipe, self.prompts[:1], 2 if number < 0 else self.steps, TIMING_SEED, output="latent")
            return clock.seconds

        found = [seconds for _, seconds in interleaved(list(on), self.rounds, call, warm_up=call)]
        low, ours, high = quartiles([seconds["method"] for seconds in found])
        _, plain, _ = quartiles([seconds["plain"] for seconds in found])
        return {"seconds": ours, "quartiles": [low, high], "seconds_plain": plain, "times_faster": plain / ours}

    def _file(self, name: str, method: Method, more: dict[str, Any], suffix: str) -> Path:
        """Where a measurement lies: its name holds a digest of all that decides it."""
        about = json.dumps([method.family, method.settings, self._common, more], sort_keys=True)
        digest = hashlib.sha256(about.encode()).hexdigest()[:12]
        slug = "".join(c if c.isalnum() or c == "." else "-" for c in name)
        return self.out / "points" / f"{slug}-{digest}{suffix}"


def _model_digest() -> str:
    weights = embedded_model_path() / "unet" / "diffusion_pytorch_model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """All of the file or nothing: a run that is stopped leaves no half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def _write_arrays(path: Path, **arrays: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/frontier"), help="default out/frontier")
    parser.add_argument("--short", action="store_true", help="4 prompts, 6 steps, a few settings")
    parser.add_argument("--num", type=int, help="prompts (default 16)")
    parser.add_argument("--steps", type=int, help="denoising steps (default 10)")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each method (default 5)")
    parser.add_argument("--only", metavar="TEXT", help="settings whose name holds TEXT")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    args = parser.parse_args()
    chosen = methods.SHORT if args.short else methods.FULL
    chosen = {name: method for name, method in chosen.items() if args.only is None or args.only in name}
    if not chosen:
        parser.error(f"--only: expected a part of a setting's name, got {args.only!r}; see benchmarks/methods.py")
    num, steps = args.num or (4 if args.short else 16), args.steps or (6 if args.short else 10)
    frontier = Frontier(args.out, torch.device(args.device), num, steps, args.rounds)
    again = frontier.point("baseline", methods.baseline())
    if again["lpips"] != 0 or again["work"] != 1:
        raise SystemExit(f"error: expected the baseline to equal itself, got {again}; nothing else was measured")
    points = [again]
    for name, method in chosen.items():
        try:
            points.append(frontier.point(name, method))
        except ImportError as error:
            print(f"note: {name} is not measured: {error}; pip install mame-sd[peers]", file=sys.stderr)
            continue
        print(
            f"{name}: {points[-1]['times_faster']:.2f}x, LPIPS {points[-1]['lpips']:.4f}", file=sys.stderr, flush=True
        )
    text = markdown(points)
    _write(args.out / "frontier.md", text.encode())
    plot(points, args.out / "frontier.png")
    print(text)
    about = {"num": num, "steps": steps, "machine": machine(frontier.device), "verdict": verdict(points)}
    print(json.dumps({"benchmark": "frontier", **about, "points": points}))


if __name__ == "__main__":
    main()
