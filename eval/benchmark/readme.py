"""``benchmark --suite readme``: measure README's table by one command.

A column of the table is a case: a model with its prompts, steps and guidance. Cases and their rows
are data (`CASES`). Each is measured like any benchmark, or by `measure_samples` if the model is no
pipeline. The result is one JSON file, which `markdown` formats as the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mame_sd.report import counted

from ..results.schema import MethodResult, Results, Value
from ..tables import markdown_table
from .rows import BASELINE, Row, chosen_rows
from .samples import Sampler
from .suites import Suite

FORMAT = "mame-sd readme 1"
# In front of a table in a page: the file; then, if not all of it is shown, its cases and rows.
MARKER = "<!-- table of {}{} -->"
NEAR = ("psnr", "psnr_object", "lpips", "latency", "speedup", "cpu")
# FID and the Inception score are measured if --weights-dir has Inception's weights.
SETS = ("fid", "is", "fd_dinov2", "kid_dinov2", "clip_score")
# The rows of a case: our settings, fewer steps, what does nothing clever, others' methods.
FEWER = "fewer-1,fewer-2"
PLAIN = "unfitted-0.25,random-0.25,mean-attention"
COPIED = "copied-0.125"
RESTORED = (
    *("keep=0.25", "keep=1,mlp_keep=0.125", "mlp_keep=0.25"),
    *("block_keep=0.5", "block_keep=0.25"),
)
# The transformer has no T5: 256 of its text tokens are equal. The first row computes all of them,
# the second computes them as one and merges nothing.
TEXT = ("equal_text=False", "keep=1")
PAPER = "mame-0.8"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A column of the table.

    Attributes:
        title: Head of the column, before the number of prompts or draws.
        suite: The suite. Without a pipeline, its prompts are batches of samples ("draws").
        load: Returns a model that is no text-to-image pipeline; raises UserError or MachineError if
            its weights can't be had. If None, the model is the suite's.
    """

    title: str
    suite: Suite
    load: Callable[[], Sampler] | None = None

    @property
    def name(self) -> str:
        """Return the name of the case, which is also that of its folder or file."""
        return self.suite.name

    def rows(self, names: str | None = None, own: Sequence[str] = ()) -> list[Row]:
        """Return the case's rows.

        Args:
            names: Names of rows to use instead of the case's.
            own: Settings of rows to add.
        """
        return chosen_rows(names or self.suite.rows, [*(() if names else self.suite.own), *own])


def _case(
    name: str,
    title: str,
    model: str,
    num: int,
    steps: int,
    rows: str,
    rounds: int = 9,
    load: Callable[[], Sampler] | None = None,
    **more: Any,
) -> Case:
    """Return a case of an embedded model, on prompts that no default was chosen on."""
    fields = {"metrics": NEAR, "fetch": ("lpips-alex",), **more}
    suite = Suite(
        name=name, about=f"README's column: {title}.", model=f"embedded-{model}", prompts="drawn",
        num=num, steps=steps, rows=rows, rounds=rounds, held_out=True, **fields,
    )  # fmt: skip
    return Case(title=title, suite=suite, load=load)


def _terrain() -> Sampler:
    """Return the published UNet of terrain, which gives eight maps in one step."""
    from ..networks.terrain_unet import TERRAIN, load_terrain, terrain_noise
    from ..weights.registry import REGISTRY

    model = load_terrain()

    def sample(number: int, steps: int) -> Any:
        noise, difficulty = terrain_noise(number, maps=8)
        return model.denoise(noise, 80, difficulty)

    identity = {"name": TERRAIN, "sha256": REGISTRY[TERRAIN].sha256}
    return Sampler(model.unet, sample, identity)


def _instrument(name: str) -> Sampler:
    """Return an instrument: held-out thumbnails for each draw, guidance 2."""
    from ..instruments.flow import sample
    from ..instruments.models import conditions, load_instrument

    instrument, thumbnails = load_instrument(name), conditions(name)

    def samples(number: int, steps: int) -> Any:
        one = thumbnails[number % len(thumbnails)][None]
        return sample(instrument, one, steps, 2.0, seed=number)

    time = 2 if len(instrument.kind.shape) == 4 else None
    return Sampler(instrument.model, samples, {"name": name, "guidance": 2}, time)


CASES = (
    _case(
        "transformer-4", "transformer, 4 steps", "transformer", 128, 4,
        f"mame-default,{FEWER},{COPIED},{PLAIN},toma-50,{PAPER}",
        own=(*TEXT, *RESTORED),
    ),
    _case(
        "transformer-8", "transformer, 8 steps", "transformer", 32, 8,
        f"mame-default,{FEWER},fewer-3,fewer-4,random-0.25", own=(*TEXT, *RESTORED),
    ),
    _case(
        "transformer-guided", "transformer, 4 steps, guidance 7.5", "transformer", 32, 4,
        f"mame-default,{FEWER},random-0.25", guidance=7.5,
        own=(*TEXT, *RESTORED),
    ),
    _case(
        "unet-4", "UNet, 4 steps", "unet", 8, 4,
        f"mame-default,{FEWER},{PLAIN},tomesd-25,tomesd-50,{PAPER}",
    ),
    _case(
        "terrain", "published UNet of terrain", "", 10, 1,
        "mame-default,unfitted-0.25,random-0.25", load=_terrain,
    ),
    _case(
        "few-steps", "transformer with a LoRA for 4 steps, no guidance", "transformer", 128, 4,
        f"mame-default,{FEWER},{COPIED},random-0.25,mean-attention",
        own=(*TEXT, *RESTORED), guidance=1.0, loras=("embedded-few-steps",),
    ),
    _case(
        "photographs", "transformer of photographs, 4 steps, guidance 2", "", 32, 4,
        f"mame-default,{FEWER},{COPIED},random-0.25,mean-attention", own=RESTORED,
        load=partial(_instrument, "photographs"),
    ),
    _case(
        "video", "transformer of clips, 4 steps, guidance 2 (changes of frames)", "", 64, 4,
        f"mame-default,{FEWER},{COPIED},copied-frames,second-frames,random-0.25,mean-attention",
        own=RESTORED, load=partial(_instrument, "video"),
    ),
    _case(
        "transformer-sets", "transformer, 4 steps, sets of images", "transformer", 500, 4,
        f"mame-default,{COPIED},{FEWER},mean-attention", rounds=1,
        metrics=SETS, fetch=("dinov2-saliency", "clip"), other_seed=1,
    ),
)  # fmt: skip


def stored_case(
    title: str,
    made: Mapping[str, Any],
    rows: Iterable[tuple[Row | MethodResult, Mapping[str, Value]]],
) -> dict[str, Any]:
    """Return one case as the JSON file holds it.

    Args:
        title: Head of its column.
        made: The command and the commit that made it.
        rows: Rows with their values by metric.
    """
    lines = [
        {
            "name": row.name,
            "label": row.label,
            "config": dict(row.config),
            "values": {metric: value.to_json() for metric, value in values.items() if value.known},
        }
        for row, values in rows
    ]
    return {"title": title, **made, "rows": lines}


def of_results(case: Case, results: Results) -> dict[str, Any]:
    """Return a finished benchmark as a stored case."""
    guidance = results.manifest["sampling"]["guidance"]
    title = case.title if "guidance" in case.title else f"{case.title}, guidance {guidance:g}"
    rows = [(row, row.values) for row in results.measured]
    made = {name: results.manifest.get(name) for name in ("command", "commit")}
    return stored_case(f"{title}, {counted(results.images, 'prompt')}", made, rows)


def stored(cases: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the JSON file.

    Args:
        cases: Stored cases by name.
        about: What else the figures depend on: versions, threads, device, command.
    """
    return {"format": FORMAT, **about, "cases": dict(cases)}


def markdown(
    content: Mapping[str, Any],
    names: Sequence[str] = (),
    brief: bool = False,
    rows: Sequence[str] = (),
) -> str:
    """Format a stored result as a table: a row per method, a column per case.

    Args:
        content: The content of the JSON file.
        names: Names of the cases to show. If empty, all.
        brief: True to show a case's model and the means alone, without the steps, the 95 %
            intervals of the PSNR and of times as fast, and the PSNR of a part.
        rows: Names of the rows to show. If empty, all.
    """
    cases = {name: case for name, case in content["cases"].items() if not names or name in names}
    labels: dict[str, str] = {}
    for case in cases.values():
        labels |= {row["name"]: row["label"] for row in case["rows"]}
    labels.pop(BASELINE, None)
    if rows:
        labels = {name: labels[name] for name in rows}
    lines = []
    for name, label in labels.items():
        label = f"`{label}`" if "=" in label else label  # settings
        bold = f"**{label}**" if name == "mame-default" else label
        of_row = [[r for r in case["rows"] if r["name"] == name] for case in cases.values()]
        cells = (_cell(one[0]["values"], brief) if one else "" for one in of_row)
        lines.append([bold, *cells])
    titles = [case["title"] for case in cases.values()]
    titles = [title.partition(", ")[0] for title in titles] if brief else titles
    return markdown_table(["", *titles], lines)


def _cell(values: Mapping[str, Any], brief: bool) -> str:
    """Format a row's values in a case, such as `31.5 ± 0.7 dB (25.1), 1.15 times (1.13 to 1.18)`.

    After the PSNR is that within the object, or that of the changes from frame to frame of a clip.
    """
    parts = []
    if "psnr" in values:
        near, second = values["psnr"], values.get("psnr_object") or values.get("psnr_changes")
        within = "" if brief or not near["high"] else f" ± {(near['high'] - near['low']) / 2:.1f}"
        inside = f" ({second['mean']:.1f})" if second and not brief else ""
        parts.append(f"{near['mean']:.1f}{within} dB{inside}")
    for name, label, digits in (
        ("fid", "FID", 1), ("is", "IS", 2), ("fd_dinov2", "FD", 1), ("kid_dinov2", "KID", 2),
        ("clip_score", "CLIP", 1),
    ):  # fmt: skip
        if name in values:
            parts.append(f"{label} {values[name]['mean']:.{digits}f}")
    speed = values.get("cpu_speedup", values.get("speedup"))  # the first of an earlier version
    if speed:
        low, high = speed["low"], speed["high"]
        between = "" if brief or low is None else f" ({low:.2f} to {high:.2f})"
        parts.append(f"{speed['mean']:.2f} times{between}")
    return ", ".join(parts)
