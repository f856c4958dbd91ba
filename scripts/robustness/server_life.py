"""A server's life: many threads and one model, settings of their own, and 500 images in one
process.

    python -m scripts.robustness.server_life [--images 20] [--threads 8] [--memory 500]

Every image is compared, bit for bit, with one that a single thread made from the same noise, at the
same size and settings, before. Parts, on tiny Stable Diffusion pipelines of random weights (256 and
64 tokens):

    using       one pipeline, each thread with sizes and settings of its own (`handle.using`)
    shared      two plain pipelines that share a UNet, one `apply_mame`
    pipelines   one StableDiffusionMaMePipeline, another tau or keep in each call
    two         two StableDiffusionMaMePipelines that share a UNet: one waits, or raises
    memory      one image after the other; resident memory after a fifth and at the end

Prints one JSON line a part. The exit status is 1 when an image differs from all that it may be. It
is 1 too when an error is another than RuntimeError that names the reason, or memory grows by more
than 16 MiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from mame_sd.diffusion.apply_denoiser import apply_mame
from mame_sd.pipelines import StableDiffusionMaMePipeline
from tests.builders.tiny import generate, tiny_components, tiny_pipeline

SETTINGS: list[dict[str, Any]] = [
    {"keep": 0.5, "min_tokens": 16},
    {"keep": 0.25, "min_tokens": 16},
    {"tau": 0.3, "min_tokens": 16},
    {"keep": 0.5, "min_tokens": 16, "fit_queries": 0},
]
SIZES = [(32, 32), (48, 32), (16, 64)]
STEPS = 3
UNDER_WAY = "expected no image under way in another thread"
TEXT = (
    threading.Lock()
)  # a tokenizer of transformers pads as its latest call in any thread asked for
GROWTH = 16 * 2**20


def image(pipe: Any, seed: int, size: tuple[int, int], **call: Any) -> bytes:
    """The bytes of one image."""
    height, width = size
    with TEXT:
        words, none = pipe.encode_prompt("a red key", "cpu", 1, do_classifier_free_guidance=True)
    call = {
        **call,
        "prompt_embeds": words,
        "negative_prompt_embeds": none,
        "num_inference_steps": STEPS,
    }
    return generate(pipe, None, seed=seed, height=height, width=width, **call).numpy().tobytes()


class Part:
    """Threads that make images, what they may be, and what came."""

    def __init__(self, threads: int, images: int) -> None:
        self.threads, self.images = threads, images
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def run(self, work: Callable[[int, random.Random], None]) -> None:
        """`work(number, draw)` for each image in the threads."""
        with ThreadPoolExecutor(self.threads) as pool:
            for number in range(self.images):
                pool.submit(self._guarded, work, number, random.Random(number))

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except RuntimeError as error:
            self.count(
                "refused" if UNDER_WAY in str(error) else f"{type(error).__name__}: {error}"[:200]
            )
        except Exception as error:
            self.count(f"{type(error).__name__}: {error}"[:200])

    def check(self, found: bytes, allowed: list[bytes]) -> None:
        self.count("equal" if found in allowed else "different")

    def ended(self, name: str) -> bool:
        print(
            json.dumps(
                {"part": name, "threads": self.threads, **dict(sorted(self.counts.items()))}
            ),
            flush=True,
        )
        return set(self.counts) <= {"equal", "refused"} and self.counts["equal"] > 0


def using(part: Part) -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **SETTINGS[0])

    def made(choice: int, size: tuple[int, int]) -> bytes:
        with handle.using(**SETTINGS[choice]) if choice else nullcontext():
            return image(pipe, choice, size)

    cases = [(choice, size) for choice in range(len(SETTINGS)) for size in SIZES]
    expected = {case: made(*case) for case in cases}

    def work(number: int, draw: random.Random) -> None:
        case = cases[number % len(cases)]
        part.check(made(*case), [expected[case]])

    part.run(work)


def shared(part: Part) -> None:
    first = tiny_pipeline()
    second = StableDiffusionPipeline(**{**tiny_components("dpm++"), "unet": first.unet})
    second.set_progress_bar_config(disable=True)
    apply_mame(first, **SETTINGS[0])
    expected = {(0, size): image(first, 0, size) for size in SIZES}
    expected |= {(1, size): image(second, 1, size) for size in SIZES}
    busy = threading.Lock()  # the second one's scheduler keeps what it has seen

    def work(number: int, draw: random.Random) -> None:
        which, size = number % 2, SIZES[number % len(SIZES)]
        with busy if which else nullcontext():
            part.check(image((first, second)[which], which, size), [expected[which, size]])

    part.run(work)


def pipelines(part: Part) -> None:
    pipe = StableDiffusionMaMePipeline(
        **tiny_components(), keep=0.5, mame_config={"min_tokens": 16}
    )
    pipe.set_progress_bar_config(disable=True)
    calls: list[dict[str, Any]] = [{}, {"keep": 0.25}, {"tau": 0.3}, {"tau": None}]
    expected = {
        (n, size): image(pipe, n, size, **call) for n, call in enumerate(calls) for size in SIZES
    }

    def work(number: int, draw: random.Random) -> None:
        case = number % len(calls), SIZES[number % len(SIZES)]
        part.check(image(pipe, *case, **calls[case[0]]), [expected[case]])

    part.run(work)


def two(part: Part) -> None:
    first = StableDiffusionMaMePipeline(
        **tiny_components(), keep=0.5, mame_config={"min_tokens": 16}
    )
    second = StableDiffusionMaMePipeline(
        **{**tiny_components(), "unet": first.unet}, keep=0.25, mame_config={"min_tokens": 16}
    )
    pipes = (first, second)
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    expected = {(n, size): image(pipes[n], n, size) for n in (0, 1) for size in SIZES}

    def work(number: int, draw: random.Random) -> None:
        case = number % 2, SIZES[number % len(SIZES)]
        part.check(image(pipes[case[0]], *case), [expected[case]])

    part.run(work)


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def memory(images: int) -> bool:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **SETTINGS[0])
    marks = []
    for number in range(1, images + 1):
        with handle.using(**SETTINGS[number % 4]) if number % 2 else nullcontext():
            image(pipe, number, SIZES[number % len(SIZES)])
        if number % max(images // 5, 1) == 0:
            marks.append(resident())
    print(
        json.dumps(
            {
                "part": "memory",
                "images": images,
                "resident_mib": [round(m / 2**20, 1) for m in marks],
            }
        )
    )
    return marks[-1] - marks[0] < GROWTH


PARTS: dict[str, Callable[[Part], None]] = {
    "using": using,
    "shared": shared,
    "pipelines": pipelines,
    "two": two,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--images", type=int, default=200, help="of each part with threads")
    parser.add_argument(
        "--memory", type=int, default=500, help="images one after the other; 0 leaves this part out"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    for name in filter(None, arguments.parts.split(",")):
        part = Part(arguments.threads, arguments.images)
        PARTS[name](part)
        good &= part.ended(name)
    if arguments.memory:
        good &= memory(arguments.memory)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
