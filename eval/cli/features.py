"""The body of ``mame-sd-eval features``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mame_sd.errors import UserError
from mame_sd.runs.encoders import load_encoder
from mame_sd.runs.files import check_place
from mame_sd.runs.model_files import ModelChoice

from ..images import turned_note
from ..perception.data import open_images


def run_features(
    data: Path,
    size: str,
    shares: str,
    rows: str | None,
    half: int | None,
    num: int | None,
    out: Path,
    choice: ModelChoice,
    weights_dir: Path | None,
    on_note: Callable[[str], object],
) -> str:
    """Runs the rows and gives their table.

    Raises:
        UserError, MachineError: what was done before is kept; the same call continues.
    """
    from ..networks.pretrained import SALIENCY, load_dinov2_saliency
    from ..perception import features_run as run
    from ..perception.features import DEFAULT_ROWS

    check_place(out, out)
    pixels, wanted = run.parse_size(size), run.parse_shares(shares)
    names = run.parse_rows(rows, DEFAULT_ROWS)
    if num is not None and num < 1:
        raise UserError(f"--num: expected at least 1, got {num}; correct it")
    images = open_images(data)
    files = run.half_of(images, half)
    if choice.model == SALIENCY:
        source: run.SaliencySource | run.EncoderSource = run.SaliencySource(
            load_dinov2_saliency(weights_dir, choice.offline)
        )
        identity = {"name": SALIENCY}
    else:
        encoder = load_encoder(choice)
        source, identity = run.EncoderSource(encoder), encoder.identity
    if said := turned_note(images.folder / name for name in files[:num]):
        on_note(said)
    found = run.FeaturesRun(
        source=source,
        identity=identity,
        images=images,
        files=files[:num],
        size=pixels,
        shares=wanted,
        rows=names,
        out=out,
        on_note=on_note,
    )
    return run.table(found.run())
