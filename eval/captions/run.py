"""Caption every picture by every row: `mame-sd-eval caption`.

    OUT/captions.jsonl     a line for each row and picture: caption, visual tokens, seconds

KL is the divergence from the unmerged model's next words to a row's, in nats, as a mean over the
words of the unmerged model's caption.

A stopped run continues with what is missing. Rows take turns on a picture, and each row's seconds
are divided by the baseline's of the same turn. For a row that is added later the baseline is timed
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mame_sd.runs.devices import pick_device, pick_dtype
from mame_sd.runs.files import check_place
from mame_sd.runs.model_files import ModelChoice

from ..images import load_image
from ..perception.encoders import check_size
from ..runner import Lines, Store, measure_cases
from ..stats import mean_interval, paired_difference
from ..tables import interval_cell, markdown_table
from ..timing import seconds_of
from .model import EMBEDDED, Captioner, load_captioner
from .references import SCORES, Pictures, language_scores, read_references
from .rows import ROWS, chosen_rows
from .settings import CaptionSettings

BASELINE = "baseline"
FORMAT = "mame-sd captions 2"


def run_caption(
    settings: CaptionSettings,
    choice: ModelChoice,
    on_note: Callable[[str], object],
) -> dict[str, Any]:
    """Caption what is missing in the folder of results.

    Args:
        settings: the options of the command.
        choice: the model.
        on_note: called with a line of progress after each picture.

    Returns:
        The figures of the table.

    Raises:
        UserError: an option, the model or the references are invalid, the folder belongs to
            another run, or this model can't run a row. What was done before is kept.
    """
    check_place(settings.out, settings.out)
    rows = chosen_rows(settings.rows)
    assert settings.references is not None
    assert settings.data is not None
    pictures = read_references(settings.references, settings.data, settings.num)
    device = pick_device(choice.device)
    identity = {
        "model": choice.model or EMBEDDED,
        "revision": choice.revision,
        "device": device.type,
        "dtype": str(pick_dtype(choice.dtype, device)).removeprefix("torch."),
        "tokens": settings.tokens,
    }
    store = Store(settings.out / "captions.jsonl", FORMAT, "captions", identity, ("row", "picture"))
    captioner = load_captioner(choice, settings.weights_dir)
    caption_pictures(captioner, pictures, rows, settings.tokens, store, on_note)
    return {"identity": identity, "rows": figures_of(store.lines, pictures, rows)}


def caption_pictures(
    captioner: Captioner,
    pictures: Pictures,
    rows: Sequence[str],
    tokens: int,
    store: Store,
    on_note: Callable[[str], object],
) -> None:
    """Caption every picture by every row that is missing in `store`, the baseline first.

    Args:
        captioner: the captioner.
        pictures: the pictures and their references.
        rows: names of the rows.
        tokens: largest number of tokens of a caption.
        store: the lines of results.
        on_note: called with a line of progress after each picture.
    """
    names = list(pictures.files)

    def measure(name: str, missing: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        pixels = load_image(pictures.files[name])
        check_size(pixels, str(pictures.files[name]))
        inputs = captioner.call(Image.fromarray(pixels))
        unmerged: Tensor | None = None
        plain = _caption(captioner, BASELINE, inputs, tokens)
        for row in missing:
            made = plain if row == BASELINE else _caption(captioner, row, inputs, tokens)
            line = dict(made)
            for part in ("first", "whole"):
                line[f"{part}_share"] = made[part] / plain[part]
            if row != BASELINE:
                ids = store.lines[BASELINE, name]["ids"]
                if unmerged is None:
                    unmerged = _read(captioner, BASELINE, inputs, ids)
                read = _read(captioner, row, inputs, ids)
                line["kl"] = float((unmerged.exp() * (unmerged - read)).sum(-1).mean())
            yield row, line
        on_note(f"{names.index(name) + 1} of {len(names)} pictures")

    measure_cases(store, names, rows, measure, lambda name, row: {"row": row, "picture": name})


@torch.inference_mode()
def _caption(captioner: Captioner, row: str, inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Write one caption; measure its visual tokens and the seconds to its first and last token."""
    with ROWS[row].method(captioner.model) as calls:
        write = partial(captioner.model.generate, **inputs, do_sample=False)  # the row's
        _, first = seconds_of(partial(write, max_new_tokens=1), captioner.device)
        ids, whole = seconds_of(partial(write, max_new_tokens=tokens), captioner.device)
        (visual,) = calls.report().layers
    written = ids[0, inputs["input_ids"].shape[1] :]
    return {
        "caption": captioner.text(written),
        "ids": written.tolist(),
        "visual": visual.tokens_kept,
        "first": first,
        "whole": whole,
    }


@torch.inference_mode()
def _read(captioner: Captioner, row: str, inputs: dict[str, Any], ids: list[int]) -> Tensor:
    """Return the log-probabilities [T, words] of the words of a caption behind the prompt."""
    caption = torch.tensor([ids], device=inputs["input_ids"].device)
    call = {**inputs, "input_ids": torch.cat([inputs["input_ids"], caption], 1)}
    if call.get("attention_mask") is not None:
        seen = torch.ones_like(caption)
        call["attention_mask"] = torch.cat([call["attention_mask"], seen], 1)
    with ROWS[row].method(captioner.model):
        logits = captioner.model(**call).logits[0, -len(ids) - 1 : -1]
    return logits.float().log_softmax(-1)


def figures_of(done: Lines, pictures: Pictures, rows: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of each row, the baseline first.

    Args:
        done: the lines of results.
        pictures: the pictures and their references.
        rows: names of the rows.
    """
    names = list(pictures.files)
    each = {name: name for name in names}
    every = {row: {name: done[row, name] for name in names} for row in rows}
    kl = {row: {name: one["kl"] for name, one in every[row].items()} for row in rows[1:]}
    figures_by_row = []
    for row, records in every.items():
        captions = {name: str(one["caption"]) for name, one in records.items()}
        figures: dict[str, Any] = {"row": row, **language_scores(captions, pictures.references)}
        if row in kl:
            interval = mean_interval(kl[row], each)
            figures["kl"] = interval["mean"]
            figures["kl_interval"] = [interval["low"], interval["high"]]
        for name in ("visual", "first", "whole"):
            figures[name] = float(np.mean([one[name] for one in records.values()]))
        for name in ("first_share", "whole_share"):
            figures[name] = float(np.median([one[name] for one in records.values()]))
        other = row.replace("keep-", "divprune-")
        if other != row and {row, other} <= kl.keys():
            figures["kl_over"] = paired_difference(kl[row], kl[other], each)
        figures_by_row.append(figures)
    return figures_by_row


def table(result: Mapping[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    columns = {"visual": ".1f", "kl": ".3f", **dict.fromkeys(SCORES, ".3f")}
    columns |= {"first_share": ".2f", "whole_share": ".2f"}
    heads = {"kl": "KL", "first_share": "first token", "whole_share": "caption"}
    lines, notes = [], []
    for row in result["rows"]:
        label = ROWS[row["row"]].label
        cells = (format(row[name], form) if name in row else "" for name, form in columns.items())
        lines.append([label, *cells])
        if "kl_over" in row:
            notes.append(f"\n{label}: KL less DivPrune's {interval_cell(row['kl_over'])}")
    return "\n".join([markdown_table(["", *(heads.get(c, c) for c in columns)], lines), *notes])
