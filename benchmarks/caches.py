"""Merging on top of caches: what each cache gives alone, what merging adds to it, and where there
are too few steps for caches.

    python -m benchmarks.caches --num 16  # the embedded UNet, 20 steps
    python -m benchmarks.caches --model embedded-transformer --dtype bfloat16 --num 16
    python -m benchmarks.caches --only DeepCache --steps 10 --rounds 3  # run again to continue

Images per second are of whole calls, from the prompt to the pixels, one guided image at a time. All
rows of a table are timed in turns. LPIPS and PSNR compare with the image that the same model makes
of the same prompt, seed and steps without cache or merging. Intervals are of 95 %, over prompts.
*On its cache* is a row's speed over that of its cache alone. *Computed* says in how many of their
calls the layers that merge computed anything. In the others the cache has the answer, and merging
nothing to gain. Of 1, 2 and 4 steps, and of an image that is changed a little (`--strength`),
caches are measured alone.

Writes caches.md into --out, and a file for each row's images and each round's times: what is there
is not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoPipelineForImage2Image

from benchmarks.caching import (
    AnyCache,
    DeepCache,
    cached,
    calibrated,
    faster,
    first_block,
    magnitude,
    one_run,
    pyramid,
    taylorseer,
)
from benchmarks.generation import clocked, generate, load
from benchmarks.instruments import INSTRUMENTS
from benchmarks.timing import machine
from mame_sd import MaMeConfig, MaMeHandle
from mame_sd.diffusion.apply_denoiser import denoiser_of, mame
from mame_sd.errors import MachineError, UserError
from mame_sd.eval.metrics.lpips import load_lpips
from mame_sd.eval.metrics.psnr import psnr
from mame_sd.eval.stats import mean_interval
from mame_sd.eval.timing import interleaved, quartiles, timed
from mame_sd.runs.files import write_atomically, written_whole
from mame_sd.runs.loading import LoadedModel

BATCH = 4
TIMING_SEED = 1000
FEW = (1, 2, 4)
MERGING = "merging"
GAIN, LOSS = 1.2, 2.0  # goals: times faster on top of a cache, and times its LPIPS
Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    name: str
    cache: AnyCache | None = None
    merging: MaMeConfig | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """JSON values that say all of it."""
        cache = None if self.cache is None else {"name": self.cache.name, **self.cache.settings}
        return {"cache": cache, "merging": self.merging and self.merging.to_dict()}


@dataclass(frozen=True)
class Scene:
    """One table: runs of `steps` steps; with `strength`, of an image of the first table that is
    changed that much.
    """

    name: str
    steps: int
    strength: float | None = None

    @property
    def calls(self) -> int:
        """Steps that are run: of an image that is changed, the last ones."""
        return (
            self.steps
            if self.strength is None
            else min(self.steps, int(self.steps * self.strength))
        )


def caches_of(denoiser: Any, steps: int, ratios: Callable[[], list[float]]) -> dict[str, AnyCache]:
    """What users would take on this denoiser; MagCache takes its `ratios` of so many `steps`."""
    if hasattr(denoiser, "down_blocks"):
        return {
            **{f"DeepCache {interval}": DeepCache(interval) for interval in (2, 3)},
            "PyramidAttentionBroadcast": pyramid(),
            "TaylorSeer": taylorseer(5, layers=[r".*\.attn1"]),
        }
    return {
        "PyramidAttentionBroadcast": pyramid(),
        "FasterCache": faster(),
        "FirstBlockCache": first_block(0.05),
        "MagCache": magnitude(steps, ratios()),
        "TaylorSeer": taylorseer(5),
    }


class Caches:
    """The measurement of one model on one machine, kept in the folder `out`.

    Args:
        distance: LPIPS of images [n, 3, H, W] in [0, 1] and those without cache or merging.
    """

    def __init__(
        self, out: Path, model: LoadedModel, distance: Distance, prompts: list[str], rounds: int
    ) -> None:
        self.out, self.model, self.prompts, self.rounds = out, model, prompts, rounds
        self.denoiser, self._distance = denoiser_of(model.pipe), distance
        about = {"prompts": prompts, "model": model.identity["sha256"], "guidance": model.guidance}
        self._threads = {"threads": torch.get_num_threads()}  # decide times, not images
        self._common = {
            **about,
            "dtype": str(model.pipe.dtype),
            "machine": machine(model.pipe.device) | {"threads": None},
        }
        changed = AutoPipelineForImage2Image.from_pipe(model.pipe, dtype=self.denoiser.dtype)
        changed.set_progress_bar_config(disable=True)
        self._changing = replace(model, pipe=changed)
        self._given: np.ndarray | None = None  # images of the first table, uint8 [n, H, W, 3]

    def rows(self, scene: Scene, config: MaMeConfig, only: str | None, together: bool) -> list[Row]:
        """The rows of a table: caches whose name holds `only`, alone and, if `together`, with
        merging by `config`.
        """

        found = [Row("neither"), Row(MERGING, merging=config)]
        for name, cache in caches_of(
            self.denoiser, scene.calls, lambda: self._ratios(scene)
        ).items():
            if only is not None and only.lower() not in name.lower():
                continue
            error = self._failure(cache, scene)
            if error is not None:
                print(
                    f"note: {name} is not measured, it fails without merging too: {error}",
                    file=sys.stderr,
                )
                continue
            found.append(Row(name, cache))
            if together:
                found.append(Row(f"{name} + {MERGING}", cache, config))
        return found

    def images(self, scene: Scene, rows: list[Row]) -> list[tuple[np.ndarray, float | None]]:
        """`_images` of each row, made where they aren't yet: the part that other work may share the
        machine with.
        """
        made = [self._images(scene, row) for row in rows]
        if scene.strength is None and self._given is None:
            self._given = made[0][0]
        return made

    def table(self, scene: Scene, rows: list[Row]) -> dict[str, Any]:
        """The figures of a table, from files or measured now."""
        made = self.images(scene, rows)
        times = self._times(scene, rows)
        found: dict[str, dict[str, Any]] = {}
        for row, (images, computed) in zip(rows, made, strict=True):
            whole, denoiser = ([seconds[row.name][i] for seconds in times] for i in (0, 1))
            low, middle, high = quartiles(whole)
            found[row.name] = {
                **row.settings,
                "images_per_second": 1 / middle,
                "quartiles": [1 / high, 1 / low],
                "seconds": middle,
                "denoiser_seconds": quartiles(denoiser)[1],
                "computed": computed,
                **self._quality(images, made[0][0]),
            }
        first = found[rows[0].name]
        if first["lpips"]["mean"] != 0:
            raise SystemExit(
                f"error: expected the first row to equal itself, got LPIPS {first['lpips']}"
            )
        for row in rows:
            point = found[row.name]
            point["times_faster"] = first["seconds"] / point["seconds"]
            point["denoiser_times_faster"] = first["denoiser_seconds"] / point["denoiser_seconds"]
            if row.cache is not None and row.merging is not None:
                cache = found[row.name.removesuffix(f" + {MERGING}")]
                point["on_cache"] = cache["seconds"] / point["seconds"]
                own = cache["lpips"]["mean"]
                point["lpips_of_cache"] = point["lpips"]["mean"] / own if own else None
        return {
            "scene": scene.name,
            "steps": scene.steps,
            "strength": scene.strength,
            "rows": found,
        }

    def _images(self, scene: Scene, row: Row) -> tuple[np.ndarray, float | None]:
        """uint8 [n, H, W, 3], and the share of their calls in which the layers that merge computed
        (None: no merging).
        """
        file = (
            self.out
            / "images"
            / f"{_slug(f'{scene.name} {row.name}')}-{self._digest(scene, row.settings)}.npz"
        )
        if not file.exists():
            made = []
            with self._on(scene, row) as handle, _calls(self.denoiser) as calls:
                for first in range(0, len(self.prompts), BATCH):
                    made.append(self._generate(scene, first, BATCH, first))
                    done = (
                        f"{scene.name}, {row.name}: {first + len(made[-1])} of {len(self.prompts)}"
                        " images"
                    )
                    print(f"  {done}", end="\r", file=sys.stderr, flush=True)
                share = math.nan if handle is None else _computed(handle, len(calls))
            with written_whole(file) as whole:
                np.savez_compressed(whole, images=np.concatenate(made), computed=np.array(share))
            print(file=sys.stderr)
        with np.load(file) as arrays:
            share = float(arrays["computed"])
            return arrays["images"], None if math.isnan(share) else share

    def _times(self, scene: Scene, rows: list[Row]) -> list[dict[str, list[float]]]:
        """Of each round, [seconds of a whole call, of the denoiser alone] by row."""
        about = [self._threads, *({"name": row.name, **row.settings} for row in rows)]
        folder = self.out / "rounds" / f"{_slug(scene.name)}-{self._digest(scene, about)}"
        by_name = {row.name: row for row in rows}

        def call(name: str, number: int = -1) -> list[float]:
            warm = number < 0  # two steps will do, and an image's strength decides on them itself
            run = (
                replace(scene, steps=min(2, scene.steps))
                if warm and scene.strength is None
                else scene
            )
            with self._on(scene, by_name[name]), clocked(self.denoiser) as clock:
                _, seconds = timed(
                    lambda: self._generate(run, 0, 1, TIMING_SEED), self.model.pipe.device
                )
            return [seconds, clock.seconds]

        def progress(done: int, total: int) -> None:
            print(
                f"  {scene.name}: {done} of {total} timed calls",
                end="\r",
                file=sys.stderr,
                flush=True,
            )

        files = {number: folder / f"{number}.json" for number in range(self.rounds)}
        done = [number for number, file in files.items() if file.exists()]
        for number, seconds in interleaved(
            list(by_name), self.rounds, call, done=done, warm_up=call, on_progress=progress
        ):
            write_atomically(files[number], json.dumps(seconds).encode())
        print(file=sys.stderr)
        return [json.loads(file.read_bytes()) for file in files.values()]

    def _generate(self, scene: Scene, first: int, count: int, seed: int) -> np.ndarray:
        """Images of `count` prompts from the `first` on."""
        prompts = self.prompts[first : first + count]
        with one_run(self.denoiser):
            if scene.strength is None:
                return generate(self.model, prompts, scene.steps, seed)
            assert self._given is not None
            given = (
                torch.from_numpy(self._given[first : first + count]).permute(0, 3, 1, 2).float()
                / 255
            )
            return generate(
                self._changing, prompts, scene.steps, seed, image=given, strength=scene.strength
            )

    @contextmanager
    def _on(self, scene: Scene, row: Row) -> Iterator[MaMeHandle | None]:
        """`row` on the model; gives the handle of its merging."""
        pipe = (self.model if scene.strength is None else self._changing).pipe
        with cached(pipe, row.cache):
            if row.merging is None:
                yield None
                return
            with mame(pipe, row.merging) as handle:
                yield handle

    def _ratios(self, scene: Scene) -> list[float]:
        """MagCache's ratios of this scene's steps, from their file or measured now."""
        file = self.out / f"ratios-{self._digest(scene, None)}.json"
        if not file.exists():
            with torch.no_grad():
                found = calibrated(
                    self.denoiser, scene.calls, lambda: self._generate(scene, 0, 1, TIMING_SEED)
                )
            write_atomically(file, json.dumps(found).encode())
        ratios: list[float] = json.loads(file.read_bytes())
        return ratios

    def _failure(self, cache: AnyCache, scene: Scene) -> str | None:
        """Why `cache` can't run here, without any merging; None if it can."""
        try:
            with self._on(scene, Row("", cache)):
                self._generate(
                    scene if scene.strength else replace(scene, steps=min(2, scene.steps)),
                    0,
                    1,
                    TIMING_SEED,
                )
        except (
            Exception
        ) as error:  # a cache's hooks fail as they like on models that they do not know
            return f"{type(error).__name__}: {error}"
        return None

    def _quality(self, images: np.ndarray, plain: np.ndarray) -> dict[str, Any]:
        """Mean LPIPS and PSNR to the images of the first row, with intervals."""
        a, b = (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 for x in (images, plain))
        keys = {str(i): str(i) for i in range(len(a))}
        device = self.model.pipe.device
        values = {"lpips": self._distance(a.to(device), b.to(device)), "psnr": psnr(a, b)}
        return {
            name: mean_interval(dict(zip(keys, found.tolist(), strict=True)), keys)
            for name, found in values.items()
        }

    def _digest(self, scene: Scene, what: Any) -> str:
        about = json.dumps([self._common, scene.steps, scene.strength, what], sort_keys=True)
        return hashlib.sha256(about.encode()).hexdigest()[:12]


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in name)


@contextmanager
def _calls(module: torch.nn.Module) -> Iterator[list[None]]:
    """One entry for each forward of `module` in the block."""
    calls: list[None] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


def _computed(handle: MaMeHandle, calls: int) -> float:
    layers = [layer for layer in handle.report().layers if layer.merged]
    return sum(layer.calls for layer in layers) / (len(layers) * calls)


def markdown(table: dict[str, Any]) -> str:
    """A table and what it says of the goals."""
    changed = "" if table["strength"] is None else f" of an image, strength {table['strength']:g}"
    lines = [
        f"### {table['steps']} step{'s' if table['steps'] > 1 else ''}{changed}",
        "",
        (
            "| row | images per second (quartiles) | times faster | denoiser, times faster | on its"
            " cache | LPIPS (95 %) | times its cache's | PSNR, dB (95 %) | computed |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for name, row in table["rows"].items():
        low, high = row["quartiles"]
        on_cache, of_cache, computed = (
            row.get("on_cache"),
            row.get("lpips_of_cache"),
            row["computed"],
        )
        lines.append(
            f"| {name} | {row['images_per_second']:.3f} ({low:.3f} to {high:.3f}) |"
            f" {row['times_faster']:.2f} | {row['denoiser_times_faster']:.2f} |"
            f" {'' if on_cache is None else f'{on_cache:.2f}'} | {_interval(row['lpips'], 4)} |"
            f" {'' if of_cache is None else f'{of_cache:.2f}'} | {_interval(row['psnr'], 1)} |"
            f" {'' if computed is None else f'{computed:.0%}'} |"
        )
        if on_cache is not None:
            notes.append(_note(name, on_cache, of_cache, computed))
    return "\n".join([*lines, "", *notes]) + "\n"


def _interval(found: dict[str, Any], digits: int) -> str:
    if math.isinf(found["mean"]):
        return "equal"
    between = (
        ""
        if found["low"] is None
        else f" ({found['low']:.{digits}f} to {found['high']:.{digits}f})"
    )
    return f"{found['mean']:.{digits}f}{between}"


def _note(name: str, gain: float, loss: float | None, computed: float) -> str:
    reached = {True: "reached", False: "MISSED"}
    told = (
        f"- {name}: {gain:.2f} times faster than the cache alone (goal {GAIN:g}:"
        f" {reached[gain >= GAIN]})"
    )
    if loss is not None:
        told += f", {loss:.2f} times its LPIPS (goal at most {LOSS:g}: {reached[loss <= LOSS]})"
    if computed < 1:
        told += (
            f"; in {1 - computed:.0%} of their calls the layers that merge were cached, and nothing"
            " was left to gain"
        )
    return f"{told}."


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="embedded",
        help="embedded, embedded-transformer, or a folder of such a model (default embedded)",
    )
    parser.add_argument("--out", type=Path, default=Path("out/caches"), help="default out/caches")
    parser.add_argument("--num", type=int, default=16, help="prompts (default 16)")
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="other prompts than those that defaults were chosen on",
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of the first table (default 20)"
    )
    parser.add_argument(
        "--strength", type=float, default=0.3, help="of image to image (default 0.3)"
    )
    parser.add_argument(
        "--keep",
        type=float,
        help="share of the keys that merging keeps (default: the measured default)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each row (default 5)")
    parser.add_argument("--only", metavar="TEXT", help="caches whose name holds TEXT")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default float32, float16 on cuda",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="make the images only; the next run takes figures and times",
    )
    args = parser.parse_args()
    for name in ("num", "steps", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if not 0 < args.strength <= 1 or args.steps * args.strength < 1:
        parser.error(
            f"--strength: expected a share of the {args.steps} steps that is at least one, got"
            f" {args.strength:g}"
        )
    try:
        config = MaMeConfig() if args.keep is None else MaMeConfig(keep=args.keep)
    except ValueError as error:
        parser.error(f"--keep: {error}")
    device = torch.device(args.device)
    dtype = args.dtype or ("float32" if device.type == "cpu" else "float16")
    try:
        model = load(
            device,
            getattr(torch, dtype),
            "embedded-unet" if args.model == "embedded" else args.model,
        )
        config = model.resolved(config)
        lpips = load_lpips(device=str(device))
        instrument = INSTRUMENTS["unet" if hasattr(model.pipe, "unet") else "transformer"]
        prompts = instrument.prompts(args.num, args.held_out)
    except (UserError, MachineError) as error:
        parser.exit(2, f"error: {error}\n")
    caches = Caches(args.out, model, lpips, prompts, args.rounds)
    scenes = [Scene("steps", args.steps), *(Scene("few steps", steps) for steps in FEW)]
    tables, text = [], ""
    for scene in [*scenes, Scene("image to image", args.steps, args.strength)]:
        rows = caches.rows(scene, config, args.only, together=scene is scenes[0])
        if args.images:
            caches.images(scene, rows)
            continue
        tables.append(caches.table(scene, rows))
        text += markdown(tables[-1]) + "\n"
        print(markdown(tables[-1]), flush=True)
        write_atomically(args.out / "caches.md", text.encode())
    if args.images:
        return
    about = {
        "model": model.identity["name"],
        "num": args.num,
        "dtype": dtype,
        "machine": machine(device),
    }
    print(json.dumps({"benchmark": "caches", **about, "tables": tables}))


if __name__ == "__main__":
    main()
