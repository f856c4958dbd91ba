"""Merging of a reference image's keys, measured on edits of drawn pictures that no training saw.

    python -m benchmarks.edits --edits 8
    python -m benchmarks.edits --edits 1 --batch 1 --rounds 5
    python -m benchmarks.edits --weights DIR --rows references-0.25,random-0.25 --steps 8

Half of the edits change the ground, the others the object. Cells are means over the edits:

* dB: PSNR of an edit to the unmerged one of the same noise: of the whole picture, of the part that
  the edit changes, and of the part that it has to copy from the reference;
* times as fast: CPU seconds of unmerged edits divided by those of the row, interleaved, one thread.

`scripts/training/train_edits.py` trains the instrument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks import decibels, parser_of
from mame_sd.diffusion.apply_denoiser import apply_mame
from mame_sd.eval.instruments.edits import GRID, TEXT, Editor, captions_states, load_editor
from mame_sd.eval.instruments.flow import euler, noise_of, times
from mame_sd.eval.instruments.models import WEIGHTS
from mame_sd.eval.tables import markdown_table
from mame_sd.eval.timing import in_turns, seconds_of
from scripts.training import world
from scripts.training.pictures import rng_of
from scripts.training.pool import load_autoencoder
from scripts.training.train_edits import SHIFT, draw_set

SEED = 1  # of the edits; the training's held-out loss has 0
TOKENS = GRID**2
BEGIN = TEXT + TOKENS  # where the reference's keys begin
CHANGED = 8  # smallest difference, of 255 levels, of a pixel that counts as changed


@dataclass(frozen=True)
class Edits:
    """Edits: the model's inputs, and which pixels change.

    Attributes:
        references: latents [N, 4, 64, 64].
        words, pooled: states of the captions.
        changed: [N, 256, 256], True where the true edit differs from the reference.
    """

    references: Tensor
    words: Tensor
    pooled: Tensor
    changed: Tensor

    def part(self, at: slice) -> Edits:
        """Return some of the edits."""
        return Edits(*(value[at] for value in vars(self).values()))


@torch.no_grad()
def draw_edits(count: int) -> Edits:
    """Draw held-out edits: of the ground and of the object in turn."""
    vae, rng = load_autoencoder(), rng_of(SEED, "held-out", 0)
    pairs = []
    for i in range(count):
        first, *others = draw_set(rng, len(world.SUBJECTS), held_out=True)
        pairs.append((others[i % 2], first))
    before, after = (
        torch.from_numpy(np.stack([world.render(scene) for scene in scenes])).permute(0, 3, 1, 2)
        for scenes in zip(*pairs, strict=True)
    )
    changed = (before.int() - after.int()).abs().amax(1) >= CHANGED
    latents = vae.encode(before.float() / 127.5 - 1).latents * vae.config.scaling_factor
    states = captions_states([scene.caption for _, scene in pairs])
    return Edits(latents, *states, changed)


class FewerKeys(TorchFunctionMode):
    """Drop keys of the reference, and count those that stay for those that are dropped.

    Args:
        kind: "random" keeps a random share, "grid" a share of the places, row by row.
        share: share that stays; 0 drops all.
    """

    def __init__(self, kind: str, share: float) -> None:
        super().__init__()
        self.kind, self.share = kind, share
        self.generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        q, k, v = (given[name] for name in ("query", "key", "value"))
        count = round(self.share * TOKENS)
        if self.kind == "random":
            kept = torch.randperm(TOKENS, generator=self.generator)[:count].sort().values
        else:
            every = torch.arange(TOKENS).view(GRID, GRID)
            step = round(self.share**-1)
            kept = every[(every // GRID + every % GRID) % step == 0].flatten()
        at = torch.cat([torch.arange(BEGIN), BEGIN + kept])
        bias = torch.zeros(1, 1, 1, len(at), dtype=q.dtype)
        if count:
            bias[..., BEGIN:] = -math.log(len(kept) / TOKENS)
        return func(q, k.index_select(2, at), v.index_select(2, at), attn_mask=bias)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to compute an edit.

    Attributes:
        settings: of `apply_mame`. If None, nothing merges.
        keys: kind and share of `FewerKeys`.
        fewer: steps that are left out.
        other: True if the reference is another picture.
    """

    label: str
    settings: dict[str, Any] | None = None
    keys: tuple[str, float] | None = None
    fewer: int = 0
    other: bool = False

    @contextmanager
    def on(self, editor: Editor) -> Iterator[None]:
        """Compute the editor in this way for a `with` block."""
        with ExitStack() as stack:
            if self.settings is not None:
                stack.callback(apply_mame(editor.model, **self.settings).remove)
            if self.keys is not None:
                stack.enter_context(FewerKeys(*self.keys))
            yield


ROWS = {
    "unmerged": Row(label="unmerged"),
    "fewer-1": Row(label="one step fewer", fewer=1),
    "fewer-2": Row(label="two steps fewer", fewer=2),
    **{
        f"mlps-{share:g}": Row(label=f"MLPs on {share:g}",
                               settings={"keep": 1.0, "mlp_keep": share})
        for share in (0.25, 0.125)
    },
    "mlps-image": Row(label="MLPs on 0.125, those of the reference on all tokens",
                      settings={"keep": 1.0, "mlp_keep": 0.125, "references": 1.0}),
    **{
        f"references-{share:g}": Row(label=f"{share:g} of the reference's keys",
                                     settings={"keep": 1.0, "references": share})
        for share in (0.5, 0.25)
    },
    "random-0.25": Row(label="0.25 at random", keys=("random", 0.25)),
    "second": Row(label="every second key", keys=("grid", 0.5)),
    "default": Row(label="default", settings={}),
    "default-whole": Row(label="default, the reference as it is",
                         settings={"references": 1.0}),
    "default-half": Row(label="default, 0.5 of the reference's keys", settings={"references": 0.5}),
    "none": Row(label="no key of the reference", keys=("random", 0.0)),
    "other": Row(label="another reference", other=True),
}  # fmt: skip


@torch.no_grad()
def edited(editor: Editor, row: Row, edits: Edits, steps: int, seed: int) -> Tensor:
    """Return a row's edits as latents [N, 4, 64, 64]; noise i is drawn by `seed` + i."""
    state = noise_of(edits.references.shape[1:], len(edits.words), seed)
    references = (edits.references.roll(1, 0) if row.other else edits.references)[:, None]

    def velocity(state: Tensor, time: float) -> Tensor:
        at = torch.full((len(state),), time)
        return editor(state, at, references, edits.words, edits.pooled)

    with row.on(editor):
        return euler(velocity, state, times(steps - row.fewer, SHIFT))


@torch.no_grad()
def pictures(editor: Editor, row: Row, edits: Edits, steps: int, batch: int) -> Tensor:
    """Return a row's edits [N, 3, 256, 256] in -1..1, of which `batch` are computed at once."""
    vae, made = load_autoencoder(), []
    for at in range(0, len(edits.words), batch):
        latents = edited(editor, row, edits.part(slice(at, at + batch)), steps, at)
        made.append(vae.decode(latents / vae.config.scaling_factor).sample)
    return torch.cat(made).clamp(-1, 1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_of(__doc__)
    add: Any = parser.add_argument
    add("--weights", type=Path, default=WEIGHTS, help="folder of the instrument's weights")
    add("--edits", type=int, default=16, help="how many (default 16)")
    add("--steps", type=int, default=4, help="of an edit (default 4)")
    add("--rows", help="names with commas between (default all): " + ", ".join(ROWS))
    add("--rounds", type=int, default=0, help="time so many rounds")
    add("--batch", type=int, default=4, help="edits at once (default 4)")
    args = parser.parse_args(arguments)
    names = args.rows.split(",") if args.rows else list(ROWS)
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"--rows: expected names of {', '.join(ROWS)}, got {', '.join(unknown)}")
    torch.set_num_threads(1)
    editor, edits = load_editor(args.weights), draw_edits(args.edits)
    reference = pictures(editor, ROWS["unmerged"], edits, args.steps, args.batch)
    names = ["unmerged", *(name for name in names if name != "unmerged")]
    found = {}
    for name in names:
        made = pictures(editor, ROWS[name], edits, args.steps, args.batch)
        parts = (None, edits.changed, ~edits.changed)
        found[name] = [decibels(made, reference, part).mean().item() for part in parts]
        print(f"{name}: " + ", ".join(f"{value:.1f}" for value in found[name]), flush=True)

    def one_edit(name: str) -> float:
        one = edits.part(slice(0, 1))
        make = partial(edited, editor, ROWS[name], one, args.steps, 0)
        return seconds_of(make, torch.device("cpu"))[1]

    taken = in_turns(names, args.rounds, one_edit) if args.rounds else {}
    seconds = {name: median(values) for name, values in taken.items()}
    lines = []
    for name, values in found.items():
        cells = [ROWS[name].label, *(f"{value:.1f}" for value in values)]
        if seconds:
            cells.append(f"{seconds['unmerged'] / seconds[name]:.2f}")
        lines.append(cells)
    heads = ["row", "dB", "changed", "copied"]
    print(markdown_table([*heads, "times as fast"] if seconds else heads, lines))


if __name__ == "__main__":
    main()
