"""Run ``mame-sd compare``: images unmerged, merged and with one step fewer, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from PIL import Image

from mame_sd.cli.console import answer, progress
from mame_sd.cli.generate import level_line, load
from mame_sd.cli.sheet import (
    DIFFERENCE_SCALE,
    PANEL_SIDE,
    Cell,
    difference_map,
    draw_sheet,
    enlarge,
    nearness,
    psnr,
    write_sheet,
)
from mame_sd.config import MaMeConfig
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import Merging
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import Prompt
from mame_sd.runs.sampling import sample

UNMERGED = "unmerged"
LARGEST = 80.0  # dB of images that are equal
SMALL_SIDE = PANEL_SIDE // 2  # pixels of an image if several prompts are compared


@dataclass(frozen=True)
class Way:
    """One way to make an image: merged by `config`, and with `fewer` denoising steps."""

    label: str
    config: MaMeConfig | None = None
    fewer: int = 0


@dataclass(frozen=True)
class Panel:
    """One image of a sheet, made in one `Way`.

    Attributes:
        label: label of the way.
        image: the image.
        seconds: seconds it took: on a CPU, CPU seconds, which other programs hardly change.
        levels: what merged, each level as fields of LevelReport.
        method: `MaMeConfig.method` of the way.
        unit: unit of `seconds`.
    """

    label: str
    image: Image.Image
    seconds: float
    levels: list[dict[str, Any]]
    method: str = "keys"
    unit: str = "s"

    @property
    def heading(self) -> str:
        """Return the image's seconds, with their unit."""
        return f"{self.seconds:.2f} {self.unit}"

    def speed(self, baseline: Panel) -> float:
        """Return how many times as fast as `baseline` the image was made."""
        return baseline.seconds / max(self.seconds, 1e-9)

    def lines(self, baseline: Panel) -> tuple[str, ...]:
        """Return the lines of text below the heading, which compare the image with `baseline`."""
        if self is baseline:
            return (self.label,)
        times = f"{self.speed(baseline):.2f} times as fast"
        kept = [level_line(level, self.method) for level in self.levels]
        return (self.label, f"{times}, {nearness(baseline.image, self.image)}", *kept)


def run_compare(
    prompts: Sequence[Prompt],
    out: Path,
    rounds: int,
    choice: ModelChoice,
    settings: GenerateSettings,
    merging: MaMeConfig,
) -> None:
    """Write the sheet of the prompts, and print what merging and one step fewer do.

    Args:
        prompts: prompts, one for each row of the sheet.
        out: the sheet, a .png file.
        rounds: number of times that each image is made, for its mean seconds.
        choice: the model.
        settings: how images are sampled.
        merging: how it merges.
    """
    model = load(choice)
    ways = ways_of(merging, settings)
    rows = []
    with progress("images") as on_progress:
        for number, prompt in enumerate([*prompts] * rounds):

            def tell(done: int, each: int, number: int = number) -> None:
                on_progress(number * each + done, rounds * len(prompts) * each)

            rows.append(compare(model, prompt, settings, ways, tell, on_progress.step))
    texts = [prompt.text for prompt in prompts]
    about: dict[str, Any] = {"prompts": texts, "summary": summary_line(rows), "ways": summary(rows)}
    rounds_of = (rows[number :: len(prompts)] for number in range(len(prompts)))
    shown = [[_mean(panels) for panels in zip(*of, strict=True)] for of in rounds_of]
    sheet = compare_sheet(texts, shown, about["summary"])
    write_sheet(out, sheet, {**about, "model": model.identity})
    said = f"{about['summary']}\n{out}"
    answer(said, {"sheet": str(out), **about}, "mame-sd generate --prompts demo --out out/demo")


def _mean(panels: Sequence[Panel]) -> Panel:
    """Return the first of an image's panels with the mean seconds of all rounds."""
    return replace(panels[0], seconds=fmean(panel.seconds for panel in panels))


def ways_of(config: MaMeConfig, settings: GenerateSettings) -> list[Way]:
    """Return merging by `config`, and one step fewer if there is more than one step."""
    ways = [Way("as given" if config.given else "default", config)]
    return [*ways, Way("one step fewer", fewer=1)] if settings.steps > 1 else ways


def compare(
    model: LoadedModel,
    prompt: Prompt,
    settings: GenerateSettings,
    ways: Sequence[Way],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Panel]:
    """Make an image unmerged and in each of `ways`, from the same noise.

    Before the first image, settings that the model refuses are found, and a one-step call keeps
    warm-up out of the seconds.

    Args:
        model: the model.
        prompt: the prompt.
        settings: how images are sampled.
        ways: ways other than the unmerged one.
        on_progress: called with the numbers of images done and in all.
        on_step: called with the numbers of steps done and in all of the current image.

    Raises:
        UserError: nothing could merge in one of the ways, or the model refuses it.
    """
    (job,) = jobs_of([prompt], settings)
    on_cpu = model.identity["device"] == "cpu"
    clock, unit = (time.process_time, "CPU s") if on_cpu else (time.perf_counter, "s")
    every = [Way(UNMERGED), *ways]
    panels: list[Panel] = []
    on_progress(0, len(every))
    for way in ways:
        if way.config is not None:
            Merging(way.config).install(model).remove()
    sample(model, replace(settings, steps=1), [job])
    for way in every:
        installed = None if way.config is None else Merging(way.config).install(model)
        sampling = replace(settings, steps=settings.steps - way.fewer)
        try:
            start = clock()
            (image,) = sample(model, sampling, [job], on_step=on_step)
            seconds = clock() - start
            levels = [] if installed is None else installed.levels()
        finally:
            if installed is not None:
                installed.remove()
        method = "keys" if way.config is None else way.config.method
        panels.append(Panel(way.label, image, seconds, levels, method, unit))
        on_progress(len(panels), len(every))
    return panels


def compare_sheet(
    prompts: Sequence[str], rows: Sequence[Sequence[Panel]], title: str
) -> Image.Image:
    """Draw the panels of each prompt in a row, each but the first with its difference map.

    Args:
        prompts: the prompts.
        rows: the panels of each prompt.
        title: line above all rows.
    """
    side = PANEL_SIDE if len(rows) == 1 else SMALL_SIDE
    scale = f"darkest: {DIFFERENCE_SCALE} of 255 levels or more"
    drawn = []
    for prompt, panels in zip(prompts, rows, strict=True):
        first, cells = panels[0], []
        for panel in panels:
            lines = (*panel.lines(first), *([prompt] if panel is first else []))
            cells.append(Cell(enlarge(panel.image, side), lines, panel.heading))
            if panel is not first:
                gap = enlarge(difference_map(first.image, panel.image), side)
                cells.append(Cell(gap, ("difference from unmerged", scale)))
        drawn.append(cells)
    return draw_sheet(drawn, title)


def summary(rows: Sequence[Sequence[Panel]]) -> dict[str, Any]:
    """Summarise each way over `rows`, each of which has one prompt's panels, unmerged first.

    Returns:
        By label of the way: its mean "seconds" and their "unit"; for all but the first way the
        median "times_as_fast" and the mean "psnr" in dB; and the "levels" of the first row.
    """
    by_way = {}
    for at, panel in enumerate(rows[0]):
        seconds = fmean(row[at].seconds for row in rows)
        about: dict[str, Any] = {"seconds": round(seconds, 3), "unit": panel.unit}
        if at:
            near = [min(psnr(row[0].image, row[at].image), LARGEST) for row in rows]
            speed = median(row[at].speed(row[0]) for row in rows)
            about |= {"times_as_fast": round(speed, 3), "psnr": round(fmean(near), 2)}
        by_way[panel.label] = {**about, "levels": panel.levels}
    return by_way


def summary_line(rows: Sequence[Sequence[Panel]]) -> str:
    """Return a line such as `1.45 times as fast, 29 dB; one step fewer: 1.22, 24 dB`."""
    (_, ours, *others) = summary(rows).items()
    parts = [f"{ours[1]['times_as_fast']:.2f} times as fast, {ours[1]['psnr']:.0f} dB"]
    for label, about in others:
        parts.append(f"{label}: {about['times_as_fast']:.2f}, {about['psnr']:.0f} dB")
    return "; ".join(parts)
