"""``mame-sd compare``: images of a few prompts unmerged, with merging and with one step fewer, side
by side, with what they cost and where they differ from the unmerged ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from PIL import Image

from mame_sd.cli.console import answer, progress
from mame_sd.cli.generate import level_line, load_to_merge
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
from mame_sd.runs.methods import Merging
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import Prompt
from mame_sd.runs.sampling import sample

UNMERGED = "unmerged"
LARGEST = 80.0  # dB, of images that are equal
SMALL_SIDE = PANEL_SIDE // 2  # of an image where several prompts are compared


@dataclass(frozen=True)
class Way:
    """One way to make an image.

    Attributes:
        label: for the sheet and the summary.
        config: settings of merging; None: unmerged.
        fewer: denoising steps fewer than asked for.
    """

    label: str
    config: MaMeConfig | None = None
    fewer: int = 0


@dataclass(frozen=True)
class Panel:
    """One way's image of a prompt.

    Attributes:
        seconds: of each round; on a CPU its own seconds, which other programs hardly change.
        levels: what merged by the `method` (fields of LevelReport); empty where nothing merges.
        unit: of the seconds.
    """

    label: str
    image: Image.Image
    seconds: tuple[float, ...]
    levels: list[dict[str, Any]]
    method: str = "keys"
    unit: str = "s"

    def speed(self, baseline: Panel) -> float:
        """Return how many times as fast it is, the median of the rounds' ratios."""
        pairs = zip(baseline.seconds, self.seconds, strict=True)
        return median(base / max(own, 1e-9) for base, own in pairs)

    @property
    def heading(self) -> str:
        """Return its mean seconds, with their unit."""
        return f"{fmean(self.seconds):.2f} {self.unit}"

    def lines(self, baseline: Panel) -> tuple[str, ...]:
        """Return what stands under the image, below its seconds."""
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
    """Write the sheet of the prompts, and print one line on what merging and one step fewer do.

    Args:
        prompts: a row of the sheet each.
        out: the sheet, a .png file.
        rounds: how often each image is made, for its seconds.
        choice, settings, merging: the model, how it is sampled, how it merges.
    """
    model, merging = load_to_merge(choice, merging, prompts)
    ways = ways_of(merging, settings)
    rows = []
    with progress("images") as on_progress:
        for number, prompt in enumerate(prompts):

            def tell(done: int, each: int, number: int = number) -> None:
                on_progress(number * each + done, len(prompts) * each)

            rows.append(compare(model, prompt, settings, ways, tell, on_progress.step, rounds))
    texts = [prompt.text for prompt in prompts]
    about = {"prompts": texts, "summary": summary_line(rows), "ways": summary(rows)}
    write_sheet(
        out,
        compare_sheet(texts, rows),
        {**about, "model": model.identity},
    )
    said = f"{about['summary']}\n{out}"
    answer(said, {"sheet": str(out), **about}, "mame-sd generate --prompts demo --out out/demo")


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
    rounds: int = 1,
) -> list[Panel]:
    """Make an image unmerged and then in each of `ways`, from the same noise, `rounds` times.

    Every round makes each image once, every other round in the opposite order. A one-step call
    before the first keeps warm-up out of the seconds.

    Raises:
        UserError: a way in which nothing could merge, or that the model refuses.
    """
    (job,) = jobs_of([prompt], settings)
    on_cpu = model.identity["device"] == "cpu"
    clock, unit = (time.process_time, "CPU s") if on_cpu else (time.perf_counter, "s")
    every = [Way(UNMERGED), *ways]
    seconds: dict[str, list[float]] = {way.label: [] for way in every}
    panels: dict[str, Panel] = {}
    done, total = 0, rounds * len(every)
    on_progress(0, total)
    sample(model, replace(settings, steps=1), [job])
    for number in range(rounds):
        for way in every[:: -1 if number % 2 else 1]:
            installed = None if way.config is None else Merging(way.config).install(model)
            own = replace(settings, steps=settings.steps - way.fewer)
            try:
                start = clock()
                (image,) = sample(model, own, [job], on_step=on_step)
                seconds[way.label].append(clock() - start)
                levels = [] if installed is None else installed.levels()
            finally:
                if installed is not None:
                    installed.remove()
            method = "keys" if way.config is None else way.config.method
            panels[way.label] = Panel(way.label, image, (), levels, method, unit)
            done += 1
            on_progress(done, total)
    return [replace(panels[way.label], seconds=tuple(seconds[way.label])) for way in every]


def compare_sheet(prompts: Sequence[str], rows: Sequence[Sequence[Panel]]) -> Image.Image:
    """Draw the panels of each prompt in a row, each but the first with its difference map."""
    side = PANEL_SIDE if len(rows) == 1 else SMALL_SIDE
    drawn = []
    for prompt, (first, *others) in zip(prompts, rows, strict=True):
        cells = [_cell(first, first, side, prompt)]
        for panel in others:
            cells.append(_cell(panel, first, side))
            gap = enlarge(difference_map(first.image, panel.image), side)
            scale = f"darkest: {DIFFERENCE_SCALE} of 255 levels or more"
            cells.append(Cell(gap, ("difference from unmerged", scale)))
        drawn.append(cells)
    return draw_sheet(drawn, summary_line(rows))


def _cell(panel: Panel, first: Panel, side: int, *more: str) -> Cell:
    return Cell(enlarge(panel.image, side), (*panel.lines(first), *more), panel.heading)


def summary(rows: Sequence[Sequence[Panel]]) -> dict[str, Any]:
    """Return, by way, mean seconds, times as fast (median) and mean dB over all prompts."""
    found = {}
    for at, panel in enumerate(rows[0]):
        seconds = [second for row in rows for second in row[at].seconds]
        about: dict[str, Any] = {"seconds": round(fmean(seconds), 3), "unit": panel.unit}
        if at:
            near = [min(psnr(row[0].image, row[at].image), LARGEST) for row in rows]
            speed = median(row[at].speed(row[0]) for row in rows)
            about |= {"times_as_fast": round(speed, 3), "psnr": round(fmean(near), 2)}
        found[panel.label] = {**about, "levels": panel.levels}
    return found


def summary_line(rows: Sequence[Sequence[Panel]]) -> str:
    """Return one line such as `1.45 times as fast, 29 dB; one step fewer: 1.22, 24 dB`."""
    (_, ours, *others) = summary(rows).items()
    parts = [f"{ours[1]['times_as_fast']:.2f} times as fast, {ours[1]['psnr']:.0f} dB"]
    for label, about in others:
        parts.append(f"{label}: {about['times_as_fast']:.2f}, {about['psnr']:.0f} dB")
    return "; ".join(parts)
