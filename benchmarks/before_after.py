"""README's picture: prompts without merging above, with it below, CPU seconds and PSNR under each.

    OMP_NUM_THREADS=1 python -m benchmarks.before_after --out docs/before-after.webp

Both images of a prompt are made right after one another. CPU seconds are those of the whole
process, so other programs of the machine hardly change them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from mame_sd.cli.compare import nearness
from mame_sd.cli.sheet import Cell, draw_sheet, enlarge
from mame_sd.config import MaMeConfig
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import load_model
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import prompts_from_texts
from mame_sd.runs.sampling import merge_in, sample

PROMPTS = (
    "panda on a yellow background",
    "sailboat on a light blue background",
    "strawberry on a white background",
    "fox on a green background",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the picture, .webp or .png")
    parser.add_argument("--model", default="embedded-unet", help="the model (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=4, help="denoising steps (default: %(default)s)"
    )
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="the prompts")
    given = parser.parse_args()
    model = load_model(ModelChoice(model=given.model))
    settings = GenerateSettings(steps=given.steps)
    jobs = jobs_of(prompts_from_texts(given.prompts), settings)
    sample(model, GenerateSettings(steps=1), jobs[:1])  # starting up is in nobody's seconds
    rows: tuple[list[Cell], list[Cell]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])
    for job in jobs:
        images = []
        for merged in (False, True):
            handle = merge_in(model, MaMeConfig()) if merged else None
            start = time.process_time()
            images += sample(model, settings, [job])
            seconds[merged].append(time.process_time() - start)
            if handle is not None:
                handle.remove()
            near = nearness(*images) if merged else "unmerged"
            lines = (f"{near}, {seconds[merged][-1]:.1f} s",)
            rows[merged].append(Cell(enlarge(images[-1], 256), lines))
    draw_sheet(rows).save(given.out, quality=88, method=6)
    totals = [round(sum(found), 2) for found in seconds]
    print(
        json.dumps(
            {
                "unmerged_s": totals[0],
                "merged_s": totals[1],
                "times": round(totals[0] / totals[1], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
