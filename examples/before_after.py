"""README's picture: four prompts unmerged and merged, with CPU seconds and PSNR under each.

    OMP_NUM_THREADS=1 python examples/before_after.py [OUT]    # default: before-after.webp

Both images of a prompt are made in turns, `ROUNDS` times; the least seconds stand below. Seconds
are those of the whole call, with text encoder and decoder.
"""

import sys
from time import process_time

import torch

from mame_sd import apply_mame, embedded_pipeline
from mame_sd.cli.difference import nearness
from mame_sd.cli.sheet import Cell, draw_sheet

PROMPTS = (
    "owl on an orange background",
    "rocket on a light blue background",
    "strawberry on a white background",
    "whale on a pink background",
)
ROUNDS = 3

pipe = embedded_pipeline()
pipe.set_progress_bar_config(disable=True)
handle = apply_mame(pipe)
rows = ([], [])  # unmerged above, merged below
for prompt in PROMPTS:
    seconds, images = ([], []), [None, None]
    for _ in range(ROUNDS):
        for merged in (0, 1):
            handle.active = bool(merged)
            start = process_time()
            noise = torch.Generator().manual_seed(0)
            images[merged] = pipe(prompt, num_inference_steps=10, generator=noise).images[0]
            seconds[merged].append(process_time() - start)
    said = "unmerged", nearness(*images)
    for row, image, words, each in zip(rows, images, said, seconds, strict=True):
        row.append(Cell(image, (f"{words}, {min(each):.1f} s",)))
draw_sheet(rows).save(sys.argv[1] if len(sys.argv) > 1 else "before-after.webp", quality=90)
