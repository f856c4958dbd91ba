"""``mame-sd compare`` and ``sheet``: images of one prompt at several settings, or of several
finished runs, side by side, with what they cost and how far they are from the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mame_sd.cli.console import progress
from mame_sd.cli.generate import load_to_merge
from mame_sd.cli.sheet import Cell, check_sheet_path, draw_sheet, enlarge, write_sheet
from mame_sd.config import MaMeConfig
from mame_sd.diffusion.saved_setting import uniform
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.methods import Merging
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import Prompt, prompts_from_texts
from mame_sd.runs.records import read_samples
from mame_sd.runs.sampling import sample

PANEL_SIDE = 512
COLUMNS = 6  # images side by side


@dataclass(frozen=True)
class Panel:
    """One setting's image: seconds, and levels (empty for the baseline) of `things`, which merge.

    On a CPU these are seconds of the CPU, which others on the machine do not lengthen.
    """

    label: str
    image: Image.Image
    seconds: float
    levels: list[dict[str, Any]]
    things: str = "keys"
    unit: str = "s"

    def lines(self, baseline: Panel) -> tuple[str, ...]:
        """What stands under the image."""
        if self is baseline:
            return (self.label, f"{self.seconds:.2f} {self.unit}", "unmerged")
        kept = [
            f"level {v['level']}: {v['tokens_kept']:.0f} of {v['tokens_in']:.0f} {self.things} kept"
            for v in self.levels
        ]
        speed = baseline.seconds / max(self.seconds, 1e-9)
        near = nearness(baseline.image, self.image)
        took = f"{self.seconds:.2f} {self.unit} ({speed:.2f} x as fast)"
        return (self.label, took, near, *kept)


def run_compare(
    text: str, out: Path, choice: ModelChoice, settings: GenerateSettings, merging: MaMeConfig
) -> None:
    """Write the sheet of a prompt, and print what stands under each image."""
    (prompt,) = prompts_from_texts([text])
    check_sheet_path(out)
    prompt = replace(prompt, id="compare")
    model, merging = load_to_merge(choice, merging, [prompt])
    variants = variants_of(merging)
    with progress("images") as on_progress:
        panels = compare(model, prompt, settings, variants, on_progress, on_progress.step)
    rows = [{"label": p.label, "seconds": p.seconds, "levels": p.levels} for p in panels]
    about = {"prompt": text, "model": model.identity, "panels": rows}
    write_sheet(out, compare_sheet(text, panels), about)
    for panel in panels:
        print("  ".join(panel.lines(panels[0])))
    print(out)


def variants_of(config: MaMeConfig) -> list[tuple[str, MaMeConfig]]:
    """The labelled `config`, and beside it other shares of the keys, the same in all layers."""
    shares = {f"keep {keep:g}": uniform(config).replace(keep=keep) for keep in (0.5, 0.125)}
    others = [(label, other) for label, other in shares.items() if other != config]
    return [("as given" if config.given else "default", config), *others]


def compare(
    model: LoadedModel,
    prompt: Prompt,
    settings: GenerateSettings,
    variants: Sequence[tuple[str, MaMeConfig]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Panel]:
    """The baseline and then each variant, from the same noise.

    A one-step call first keeps warm-up out of the seconds.

    Raises:
        UserError: a variant in which nothing could merge, or that the model refuses.
    """
    (job,) = jobs_of([prompt], settings)
    on_cpu = model.identity["device"] == "cpu"
    clock, unit = (time.process_time, "CPU s") if on_cpu else (time.perf_counter, "s")
    total = 1 + len(variants)
    on_progress(0, total)
    sample(model, replace(settings, steps=1), [job])
    panels: list[Panel] = []
    for label, config in [("baseline", None), *variants]:
        installed = None if config is None else Merging(config).install(model)
        try:
            start = clock()
            (image,) = sample(model, settings, [job], on_step=on_step)
            seconds = clock() - start
            levels = [] if installed is None else installed.levels()
            things = "keys" if config is None else config.method
            panels.append(Panel(label, image, seconds, levels, things, unit))
        finally:
            if installed is not None:
                installed.remove()
        on_progress(len(panels), total)
    return panels


def compare_sheet(prompt: str, panels: Sequence[Panel]) -> Image.Image:
    """The panels, `COLUMNS` side by side, labelled; the first is the baseline."""
    cells = [Cell(enlarge(panel.image, PANEL_SIDE), panel.lines(panels[0])) for panel in panels]
    return _in_columns([[cell] for cell in cells], prompt)


def run_sheet(folders: Sequence[Path], out: Path, num: int) -> None:
    """Write the sheet of finished runs."""
    if num < 1:
        raise UserError(f"--num: expected at least 1, got {num}; raise it")
    check_sheet_path(out)
    write_sheet(out, folders_sheet(folders, num), {"folders": [folder.name for folder in folders]})
    print(out)


def folders_sheet(folders: Sequence[Path], limit: int) -> Image.Image:
    """The first `limit` images of several run folders, `COLUMNS` side by side, run below run.

    Each run tells its PSNR to the first one.

    Raises:
        UserError: a folder that holds no run, or lacks an image that the first one has or has it
            of another prompt.
    """
    runs = [read_samples(folder, "run generate into a new folder") for folder in folders]
    columns = []  # one an image: its cell of each run
    for name, first in list(runs[0].items())[:limit]:
        column: list[Cell] = []
        for folder, samples in zip(folders, runs, strict=True):
            if name not in samples:
                raise UserError(
                    f"{folder}: expected the image {name}, which {folders[0]} has, found none;"
                    " finish that run first"
                )
            if (other := samples[name].prompt) != first.prompt:
                pairs = enumerate(zip_longest(first.prompt, other))
                alike = next(n for n, (one, two) in pairs if one != two)
                part = slice(max(0, alike - 40), alike + 40)  # where they differ
                raise UserError(
                    f"{folder}: expected {name} of the prompt {first.prompt[part]!r}, as"
                    f" {folders[0]} has it, got {other[part]!r}; give runs of the same prompts"
                )
            image = _open(samples[name].path)
            lines = [_about(folder, samples[name].row)]
            if column and image.size == column[0].image.size:
                lines.append(nearness(column[0].image, image))
            column.append(Cell(image, tuple(lines if column else [first.prompt, *lines])))
        columns.append(column)
    if not columns:
        raise UserError(f"{folders[0]}: expected a run with images, found none; run generate first")
    return _in_columns(columns)


def _in_columns(columns: Sequence[Sequence[Cell]], title: str = "") -> Image.Image:
    parts = [columns[i : i + COLUMNS] for i in range(0, len(columns), COLUMNS)]
    return draw_sheet([row for part in parts for row in zip(*part, strict=True)], title)


def _about(folder: Path, row: Mapping[str, Any]) -> str:
    parts = [folder.name]
    if row.get("seconds"):
        parts.append(f"{row['seconds']:.2f} s")
    for level in row.get("levels", [])[:1]:
        share = level["tokens_kept"] / level["tokens_in"]
        parts.append(f"{share:.0%} of {level['tokens_in']:.0f} kept")
    return ", ".join(parts)


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return enlarge(image.convert("RGB"), PANEL_SIDE // 2)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path}: can't be read as an image ({error}); run generate again"
        ) from None


def nearness(one: Image.Image, other: Image.Image) -> str:
    """PSNR in dB of two 8-bit images of one size, in words: more is nearer.

    >>> grey = Image.new("RGB", (2, 2), (100, 100, 100))
    >>> nearness(grey, grey), nearness(grey, Image.new("RGB", (2, 2), (101, 101, 101)))
    ('equal to the baseline', 'PSNR 48.1 dB')
    """
    near = psnr(one, other)
    return "equal to the baseline" if near == math.inf else f"PSNR {near:.1f} dB"


def psnr(one: Image.Image, other: Image.Image) -> float:
    """In dB, of two 8-bit images of one size; infinite where they are equal."""
    error = float(np.mean((np.asarray(one, np.float64) - np.asarray(other, np.float64)) ** 2))
    return float(10 * np.log10(255**2 / error)) if error else math.inf
