"""`mame-sd-eval caption`: every row captions every picture; captions are kept as they are made.

    OUT/captions.jsonl     a line for each row and picture: caption, visual tokens, seconds
    OUT/captions.json      the table's figures

KL is that of the unmerged model's next words to a row's, in nats, the mean over the words of the
unmerged model's caption.

A stopped run continues with what is missing. Rows take turns on a picture, so that their seconds
are comparable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mame_sd.runs.files import write_atomically

from ..images import load_image
from ..perception.encoders import check_size
from ..stats import mean_interval, paired_difference
from ..store import Store
from ..tables import markdown_table
from ..timing import seconds_of
from .model import Captioner
from .references import Pictures
from .rows import ROWS
from .scores import SCORES, language_scores, named_right

BASELINE = "baseline"
CHANCE = "the next picture's caption"
FORMAT = "mame-sd captions 1"
Done = Mapping[tuple[Any, ...], Mapping[str, Any]]  # captions by (row, picture)


@dataclass(frozen=True)
class CaptionRun:
    """What is run.

    Attributes:
        captioner: the model.
        identity: JSON values that tell this run from others.
        pictures: what is captioned.
        rows: names of rows.
        tokens: how many a caption has at most.
        longer: how many a caption has at least.
        out: folder of results.
        on_note: is told what is done.
    """

    captioner: Captioner
    identity: Mapping[str, Any]
    pictures: Pictures
    rows: Sequence[str]
    tokens: int
    longer: int
    out: Path
    on_note: Callable[[str], object]

    def run(self) -> dict[str, Any]:
        """The table's figures; captions what `out` does not hold yet.

        Raises:
            UserError: `out` holds another run, or a row can't be had of this model.
        """
        store = opened(self.out, self.identity)
        done = store.found
        for number, (name, path) in enumerate(self.pictures.files.items(), 1):
            missing = [row for row in self.rows if (row, name) not in done]
            if not missing:
                continue
            pixels = load_image(path, convert=True)
            check_size(pixels, str(path))
            inputs = self.captioner.call(Image.fromarray(pixels))
            whole: Tensor | None = None
            for row in missing:
                record = {"row": row, "picture": name, **self._caption(row, inputs)}
                if row != BASELINE and (BASELINE, name) in done:
                    ids = done[BASELINE, name]["ids"]
                    whole = self._read(BASELINE, inputs, ids) if whole is None else whole
                    own = self._read(row, inputs, ids)
                    record["kl"] = float((whole.exp() * (whole - own)).sum(-1).mean())
                store.add(record)
            self.on_note(f"{number} of {len(self.pictures.files)} pictures")
        figures = [self._figures(row, done) for row in self.rows]
        for one in figures:
            name = str(one["row"])
            other = name.replace("keep-", "divprune-")
            if other != name and {name, other} <= {*self.rows}:
                one["kl_over"] = self._over(name, other, done)
        figures.append({**figures[0], "row": "chance", **self._chance(self.rows[0], done)})
        found = {"identity": {**self.identity}, "rows": figures}
        write_atomically(self.out / "captions.json", f"{json.dumps(found, indent=1)}\n".encode())
        return found

    @torch.inference_mode()
    def _caption(self, row: str, inputs: dict[str, Any]) -> dict[str, Any]:
        """One caption, its visual tokens, and seconds until its first token and its last."""
        model, device = self.captioner.model, self.captioner.device
        lengths = {"max_new_tokens": self.tokens, "min_new_tokens": self.longer or None}
        with ROWS[row].method(model) as calls:
            write = partial(model.generate, **inputs, do_sample=False)
            _, first = seconds_of(partial(write, max_new_tokens=1), device)
            ids, whole = seconds_of(partial(write, **lengths), device)
            visual = calls.counts.kept / 2  # both calls
        written = ids[0, inputs["input_ids"].shape[1] :]
        return {
            "caption": self.captioner.text(written),
            "ids": written.tolist(),
            "visual": visual,
            "first": first,
            "whole": whole,
        }

    @torch.inference_mode()
    def _read(self, row: str, inputs: dict[str, Any], ids: list[int]) -> Tensor:
        """Log-probabilities [T, words] of each word of a caption `ids`, where it is read behind the
        prompt.
        """
        caption = torch.tensor([ids], device=inputs["input_ids"].device)
        call = {**inputs, "input_ids": torch.cat([inputs["input_ids"], caption], 1)}
        if call.get("attention_mask") is not None:
            seen = torch.ones_like(caption)
            call["attention_mask"] = torch.cat([call["attention_mask"], seen], 1)
        with ROWS[row].method(self.captioner.model):
            logits = self.captioner.model(**call).logits[0, -len(ids) - 1 : -1]
        return logits.float().log_softmax(-1)

    def _figures(self, row: str, done: Done) -> dict[str, Any]:
        """The figures of one row."""
        records = {name: done[row, name] for name in self.pictures.files}
        captions = {name: str(one["caption"]) for name, one in records.items()}
        found: dict[str, Any] = {"row": row, **self.scored(captions)}
        if all("kl" in one for one in records.values()):
            interval = mean_interval(
                {name: one["kl"] for name, one in records.items()}, {one: one for one in records}
            )
            found["kl"] = interval["mean"]
            found["kl_interval"] = [interval["low"], interval["high"]]
        for name in ("visual", "first", "whole"):
            found[name] = float(np.mean([one[name] for one in records.values()]))
        base = {name: done.get((BASELINE, name)) for name in records}
        if all(base.values()):
            for name in ("first", "whole"):
                pairs = [(one[name], base[key]) for key, one in records.items()]
                found[f"{name}_share"] = float(
                    np.median([own / whole[name] for own, whole in pairs if whole is not None])
                )
        return found

    def _over(self, row: str, other: str, done: Done) -> dict[str, Any] | None:
        """KL of one row less that of another, on the same pictures; None where one has none."""
        found: list[dict[str, float]] = []
        for own in (row, other):
            records = {name: done[own, name] for name in self.pictures.files}
            found.append({name: one["kl"] for name, one in records.items() if "kl" in one})
        if any(len(values) < len(self.pictures.files) for values in found):
            return None
        return paired_difference(found[0], found[1], {name: name for name in found[0]})

    def scored(self, captions: Mapping[str, str]) -> dict[str, Any]:
        """Scores of captions of these pictures."""
        found: dict[str, Any] = {**language_scores(captions, self.pictures.references)}
        found["words"] = float(np.mean([len(one.split()) for one in captions.values()]))
        things = self.pictures.things
        if things:
            names = sorted({name for one in things.values() for name, _ in one})
            right = {one: named_right(captions[one], things[one], names) for one in captions}
            for place, what in enumerate(("objects", "colors")):
                values = {one: pair[place] for one, pair in right.items()}
                interval = mean_interval(values, {one: one for one in values})
                found[what] = interval["mean"]
                found[f"{what}_interval"] = [interval["low"], interval["high"]]
        return found

    def _chance(self, row: str, done: Done) -> dict[str, Any]:
        """Scores where each picture is given the caption of the next one."""
        names = list(self.pictures.files)
        turned = zip(names, [*names[1:], names[0]], strict=True)
        return self.scored({name: str(done[row, other]["caption"]) for name, other in turned})


def opened(out: Path, identity: Mapping[str, Any]) -> Store:
    """What was captioned in `out` before, by row and picture.

    Raises:
        UserError: it holds another run.
        MachineError: it can't be written.
    """
    return Store(out / "captions.jsonl", FORMAT, "captions", identity, ("row", "picture"))


def table(found: Mapping[str, Any]) -> str:
    """The figures as a Markdown table."""
    things = "objects" in found["rows"][0]
    heads = ["", "visual", "KL", *SCORES, *(["objects", "with colour"] if things else [])]
    heads += ["words", "first token", "caption"]
    lines = []
    for row in found["rows"]:
        cells = [ROWS[row["row"]].label if row["row"] in ROWS else CHANCE]
        cells += [f"{row['visual']:.1f}", f"{row['kl']:.3f}" if "kl" in row else ""]
        cells += [f"{row[name]:.3f}" for name in SCORES]
        if things:
            cells += [f"{row['objects']:.2f}", f"{row['colors']:.2f}"]
        cells.append(f"{row['words']:.1f}")
        for part in ("first_share", "whole_share"):
            cells.append(f"{row[part]:.2f}" if part in row else "")
        lines.append(cells)
    notes = [
        f"\n{ROWS[row['row']].label}: KL less DivPrune's {row['kl_over']['mean']:+.3f}"
        f" [{row['kl_over']['low']:+.3f}, {row['kl_over']['high']:+.3f}]"
        for row in found["rows"]
        if row.get("kl_over") is not None and row["row"] in ROWS
    ]
    return "\n".join([markdown_table(heads, lines), *notes])
