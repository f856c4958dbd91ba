"""README's picture: prompts unmerged, merged and with a step fewer, with CPU seconds and PSNR.

    OMP_NUM_THREADS=1 python -m benchmarks.before_after --out docs/before-after.webp

The images of a prompt are made right after one another. CPU seconds are those of the whole
process, so other programs of the machine hardly change them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from PIL import Image

from mame_sd.cli.compare import nearness
from mame_sd.cli.sheet import Cell, draw_sheet, enlarge
from mame_sd.config import MaMeConfig
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import load_model
from mame_sd.runs.methods import Merging
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import prompts_from_texts
from mame_sd.runs.sampling import sample

PROMPTS = (
    "panda on a yellow background",
    "sailboat on a light blue background",
    "strawberry on a white background",
    "fox on a green background",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the picture, .webp or .png")
    out = parser.parse_args().out
    model = load_model(ModelChoice(model="embedded-unet"))
    settings = GenerateSettings(steps=4)
    jobs = jobs_of(prompts_from_texts(PROMPTS), settings)
    sample(model, GenerateSettings(steps=1), jobs[:1])  # starting up is in nobody's seconds
    fewer = replace(settings, steps=3)
    ways: dict[str, tuple[GenerateSettings, MaMeConfig | None]] = {
        "unmerged": (settings, None),
        "merged": (settings, MaMeConfig()),
        "one step fewer": (fewer, None),
    }
    rows: dict[str, list[Cell]] = {way: [] for way in ways}
    seconds = dict.fromkeys(ways, 0.0)
    for job in jobs:
        unmerged: Image.Image | None = None
        for way, (how, config) in ways.items():
            handle = None if config is None else Merging(config).install(model)
            start = time.process_time()
            (image,) = sample(model, how, [job])
            taken = time.process_time() - start
            if handle is not None:
                handle.remove()
            near = "" if unmerged is None else f", {nearness(unmerged, image)}"
            unmerged = unmerged or image
            seconds[way] += taken
            rows[way].append(Cell(enlarge(image, 256), (f"{way}{near}, {taken:.1f} s",)))
    draw_sheet(tuple(rows.values())).save(out, quality=88, method=6)
    times = {way: round(seconds["unmerged"] / total, 3) for way, total in seconds.items()}
    rounded = {way: round(total, 2) for way, total in seconds.items()}
    print(json.dumps({"seconds": rounded, "times as fast": times}))


if __name__ == "__main__":
    main()
