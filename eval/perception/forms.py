"""The forms in which `scripts/training/train_vit.py` trains its vision transformer, where the suite
`trained` finds it.

DIR/models/<form>-<seed>     a model of transformers with its image processor
DIR/pictures                 held-out pictures in class folders
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError

PLAIN = "plain"
HALVED: dict[str, Any] = {
    "tau": 0.5,
    "blocks": (3, 6, 9),
}  # the paper's, counted from 0
LAST: dict[str, Any] = {"tau": 0.5, "blocks": (-1,)}


@dataclass(frozen=True)
class Form:
    """One way of training.

    Attributes:
        merging: arguments of `apply_mame` while it is trained and when it answers; empty: none.
        begins: the form whose weights it starts with, of the same seed; None: from scratch.
    """

    name: str
    label: str
    merging: dict[str, Any] = field(default_factory=dict)
    begins: str | None = None


FORMS = {
    form.name: form
    for form in (
        Form(PLAIN, "unmerged"),
        Form("scratch", "MaMe, from scratch", HALVED),
        Form("tuned", "MaMe, fine-tuned", HALVED, PLAIN),
        Form("last", "MaMe in the last block, fine-tuned", LAST, PLAIN),
        Form("continued", "unmerged, fine-tuned", {}, PLAIN),  # what fine-tuning alone does
    )
}


@dataclass(frozen=True)
class TrainedModels:
    """What lies in the folder of a training.

    Attributes:
        seeds: those that every form which is there was trained with.
        forms: those that are there.
    """

    folder: Path
    seeds: tuple[int, ...]
    forms: tuple[str, ...]

    def model(self, form: str, seed: int) -> Path:
        """The folder of one model."""
        return self.folder / "models" / f"{form}-{seed}"

    @property
    def pictures(self) -> Path:
        """Held-out pictures."""
        return self.folder / "pictures"


def find_models(folder: Path) -> TrainedModels:
    """The models in the folder of a training.

    Raises UserError where there is no unmerged one, or no seed that all forms have.
    """
    seeds: dict[str, set[int]] = {}
    for path in (folder / "models").glob("*-*"):
        form, _, seed = path.name.rpartition("-")
        if form in FORMS and seed.isdigit() and (path / "training.json").is_file():
            seeds.setdefault(form, set()).add(int(seed))
    common = set.intersection(*seeds.values()) if seeds else set()
    if PLAIN not in seeds or not common:
        found = (
            ", ".join(sorted(f"{form}-{seed}" for form, own in seeds.items() for seed in own))
            or "none"
        )
        raise UserError(
            f"--trained {folder}: expected models/{PLAIN}-SEED, and a seed that all its forms have,"
            f" found {found}; train with scripts/training/train_vit.py first"
        )
    return TrainedModels(
        folder, tuple(sorted(common)), tuple(form for form in FORMS if form in seeds)
    )
