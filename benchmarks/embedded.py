"""Score the embedded model against the truth, and merging against no merging, on 100 prompts drawn
with a fixed seed.

    python -m benchmarks.embedded  # baseline and the default setting, into out/check
    python -m benchmarks.embedded --setting tau=0.8  # any MaMeConfig fields, with commas between
    python -m benchmarks.embedded --num 10           # a quick look

Half of the prompts are object-background pairs that training never saw. Prints one row per setting
and a last line of JSON, and writes ``contact.png``. Images are made by ``mame-sd generate``, so a
stopped check continues.

* retrieval: share of images whose nearest glyph (pixel MSE, rendered on the prompted background) is
  the prompted one.
* background: share of images whose frame is nearest to the prompted colour.
* PSNR (dB) and SSIM: of each image to the baseline's image of its prompt and seed, averaged.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchmetrics.functional.image import (
    peak_signal_noise_ratio,
    structural_similarity_index_measure,
)

from mame_sd.embedded import model as subjects
from mame_sd.eval.scoring.retrieval import TRUTHS
from mame_sd.runs.records import read_samples


def generate(prompts: Path, out: Path, setting: str, model: str | None, steps: int) -> None:
    options = ["--baseline"] if setting == "baseline" else []
    if setting not in ("baseline", "default"):
        for item in setting.split(","):
            name, _, value = item.partition("=")
            options += [f"--{name.replace('_', '-')}", value]
    command = [
        sys.executable,
        "-m",
        "mame_sd",
        "generate",
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        "--steps",
        str(steps),
    ]
    subprocess.run([*command, *options, *(["--model", model] if model else [])], check=True)


def load(run: Path, prompt: dict[str, str]) -> Image.Image:
    return Image.open(run / "images" / f"{prompt['id']}_0.png").convert("RGB")


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float() / 255


def score(run: Path, baseline: Path, prompts: list[dict[str, str]]) -> dict[str, float]:
    hits: list[bool] = []
    unseen: list[bool] = []
    backgrounds: list[bool] = []
    psnr, ssim = [], []
    for prompt in prompts:
        image = load(run, prompt)
        hits.append(subjects.nearest_glyph(image, prompt["background"]) == prompt["glyph"])
        backgrounds.append(subjects.nearest_background(image) == prompt["background"])
        if prompt["held_out"]:
            unseen.append(hits[-1])
        if run != baseline:
            a, b = as_tensor(image), as_tensor(load(baseline, prompt))
            psnr.append(min(100.0, peak_signal_noise_ratio(a, b, data_range=1.0).item()))
            ssim.append(structural_similarity_index_measure(a, b, data_range=1.0).item())
    samples = [sample.row for sample in read_samples(run, "run it again").values()]
    result = {
        "retrieval": float(np.mean(hits)),
        "retrieval_held_out": float(np.mean(unseen)),
        "background": float(np.mean(backgrounds)),
        "seconds": float(np.median([s["seconds"] for s in samples])),
    }
    if psnr:
        result |= {
            "psnr": float(np.mean(psnr)),
            "ssim": float(np.mean(ssim)),
            "kept": first_level_kept(samples),
        }
    return result


def first_level_kept(samples: list[Mapping[str, Any]]) -> float:
    """Mean share of the first level's tokens (keys, with merge=kv) that attention still sees."""
    shares = []
    for sample in samples:
        level = max(sample["levels"], key=lambda row: row["tokens_in"])
        shares.append(level["tokens_kept"] / level["tokens_in"])
    return float(np.mean(shares))


def contact_sheet(
    runs: list[Path], prompts: list[dict[str, str]], path: Path, columns: int = 10
) -> None:
    """The prompts' images of every run, run below run within each row of prompts, at 128 pixels."""
    rows = -(-len(prompts) // columns)
    sheet = Image.new("RGB", (columns * 128, rows * len(runs) * 128), "white")
    for i, prompt in enumerate(prompts):
        for j, run in enumerate(runs):
            tile = load(run, prompt).resize((128, 128), Image.Resampling.LANCZOS)
            sheet.paste(tile, (i % columns * 128, (i // columns * len(runs) + j) * 128))
    sheet.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/check"))
    parser.add_argument(
        "--setting",
        action="append",
        help="default, or MaMeConfig fields such as tau=0.8,merge=kv; repeatable",
    )
    parser.add_argument("--model", help="another pipeline folder than the embedded one")
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = [
        {"id": p.id, "prompt": p.text, **p.extra} for p in TRUTHS["unet"].draw(args.num, args.seed)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "prompts.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    settings = ["baseline", *(args.setting or ["default"])]
    runs = [args.out / s.replace("=", "-").replace(",", "_") for s in settings]
    results = {}
    for setting, run in zip(settings, runs, strict=True):
        generate(file, run, setting, args.model, args.steps)
        results[setting] = score(run, runs[0], prompts)
    contact_sheet(runs, prompts, args.out / "contact.png")
    names = ["retrieval", "retrieval_held_out", "background", "psnr", "ssim", "kept", "seconds"]
    print(f"{'setting':28}" + "".join(f"{n:>20}" for n in names))
    for setting, row in results.items():
        print(
            f"{setting:28}"
            + "".join(f"{row[n]:20.3f}" if n in row else f"{'-':>20}" for n in names)
        )
    print(
        json.dumps(
            {
                "num": args.num,
                "steps": args.steps,
                "seed": args.seed,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
