"""The body of ``mame-sd-eval caption``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mame_sd.errors import UserError
from mame_sd.runs.devices import pick_device, pick_dtype
from mame_sd.runs.files import check_place
from mame_sd.runs.model_files import ModelChoice


def run_caption(
    data: Path,
    references: Path,
    rows: str | None,
    num: int | None,
    prompt: str | None,
    tokens: int,
    longer: int,
    out: Path,
    choice: ModelChoice,
    weights_dir: Path | None,
    on_note: Callable[[str], object],
) -> str:
    """Captions what `out` does not hold yet and gives the table.

    Raises:
        UserError: bad options, no model, no references. What was done before is kept.
    """
    from ..captions.model import EMBEDDED, check_prompt, load_captioner
    from ..captions.references import read_references
    from ..captions.rows import chosen_rows
    from ..captions.run import CaptionRun, opened, table

    check_place(out, out)
    names = chosen_rows(rows)
    if tokens < 1 or not 0 <= longer <= tokens:
        raise UserError(
            f"--tokens, --longer: expected 1 or more, and from 0 to as many, got {tokens} and"
            f" {longer}; correct them"
        )
    check_prompt(choice, prompt)
    pictures = read_references(references, data, num)
    device = pick_device(choice.device)
    identity = {
        "model": choice.model or EMBEDDED,
        "revision": choice.revision,
        "device": device.type,
        "dtype": str(pick_dtype(choice.dtype, device)).removeprefix("torch."),
        "prompt": prompt,
        "tokens": tokens,
        "longer": longer,
    }
    opened(out, identity)
    captioner = load_captioner(choice, prompt, weights_dir)
    run = CaptionRun(captioner, identity, pictures, names, tokens, longer, out, on_note)
    return table(run.run())
