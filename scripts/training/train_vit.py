"""Train ViT-Ti without merging and with it on pictures of the embedded world: from scratch,
fine-tuned, in the last block only.

    python -m scripts.training.train_vit --work out/vit                     # stop, start at will
    python -m scripts.training.train_vit --work out/vit --until last-0      # up to this stage
    python -m scripts.training.train_vit --work out/vit --forms plain       # the unmerged models
    python -m scripts.training.train_vit --work out/vit-class --head class  # a class token
    python -m scripts.training.train_vit --smoke --work DIR                 # all of it in a minute
    mame-sd-eval classify --suite trained --trained out/vit                 # the table

The table can be made as soon as all forms of a seed are there.

The answer is read from the mean over tokens. From a class token, as in the paper, merging in the
last block can't change it. There merging stands after the last attention, where the class token has
met the others for the last time. The class token takes no part in merging.

The forms are those of `mame_sd.eval.perception.forms`; a seed decides weights and order of the
pictures. As in the paper a form is trained from scratch, or fine-tuned for one epoch. There it took
the merged forms alone; here the unmerged one is fine-tuned as well, so that what one more epoch
does is known.

The training set has a fixed size, so that there are epochs. Its pictures show one of ten glyphs
(`pictures.py`) in 64 x 64 pixels, moved by up to `SHIFT` pixels. Pairs of glyph and ground that are
held out are what is measured on.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from transformers import (
    PreTrainedModel,
    SiglipConfig,
    SiglipForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from mame_sd import apply_mame
from mame_sd.embedded import model as subjects
from mame_sd.eval.perception.forms import FORMS, Form
from mame_sd.runs.files import write_atomically, written_whole
from scripts.training import pictures, world
from scripts.training.contrast import MEAN, STD
from scripts.training.loop import Stage, generator, mixed_precision, muon
from scripts.training.recipe import Recipe, run

SIDE, PATCH = 64, 8
WIDTH, BLOCKS, HEADS = 192, 12, 3
NO_TEXT = {
    "bos_token_id": None,
    "eos_token_id": None,
}  # SigLIP's configuration asks for a text half
NAMES = subjects.glyph_names()[::18]
SHIFT = 4  # pixels
PICTURES, HELD_OUT = 8000, 1000
BATCH = 64
STEPS, TUNING = 250, PICTURES // BATCH  # one epoch
RATE, TUNING_RATE = 0.01, 0.001  # of Muon; AdamW's is a tenth


@dataclass(frozen=True, kw_only=True)
class FormStage(Stage):
    """One training of one form, from a seed of its own."""

    form: Form
    seed: int
    batch: int = BATCH
    warmup: int = 30
    decay: float = 0.4
    ema: float | None = 0.99


def stage_of(form: Form, seed: int) -> FormStage:
    steps, lr = (TUNING, TUNING_RATE) if form.begins else (STEPS, RATE)
    return FormStage(name=f"{form.name}-{seed}", form=form, seed=seed, steps=steps, lr=lr)


def small(pixels: np.ndarray) -> np.ndarray:
    """A picture of the world, averaged to uint8 [SIDE, SIDE, 3]."""
    cells = world.SIDE // SIDE
    return np.rint(pixels.reshape(SIDE, cells, SIDE, cells, 3).mean((1, 3))).astype(np.uint8)


def drawn(
    kind: str, number: int, names: list[str], held_out: bool = False
) -> tuple[np.ndarray, int]:
    """A picture and the number of its class."""
    pixels, scene = pictures.draw(
        pictures.rng_of(0, f"vit {kind}", number), names, held_out=held_out
    )
    return small(pixels), names.index(subjects.glyph_names()[scene.subject.glyph])


def training_set(work: Path, count: int, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures [count, 3, SIDE, SIDE] in uint8 and their classes [count], drawn when first asked
    for.
    """
    file = work / f"pictures-{count}.npz"
    if not file.exists():
        made = [drawn("train", n, names) for n in track(range(count), f"drawing {count} pictures")]
        with written_whole(file) as stream:
            np.savez(
                stream,
                pixels=np.stack([pixels for pixels, _ in made]),
                labels=np.array([label for _, label in made]),
            )
    with np.load(file) as found:
        pixels = torch.from_numpy(found["pixels"]).permute(0, 3, 1, 2)
        return pixels, torch.from_numpy(found["labels"])


def new_model(names: list[str], head: str) -> PreTrainedModel:
    """ViT-Ti with 64 patches, unmerged. It answers by its class token, or by the mean over tokens,
    as transformers' SigLIP does.
    """
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    classes = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: n for n, name in enumerate(names)},
    }
    if head == "class":
        model: PreTrainedModel = ViTForImageClassification(ViTConfig(**sizes, **classes))
    else:
        vision = {**sizes, "vision_use_head": False}
        config = SiglipConfig(text_config=NO_TEXT, vision_config=vision, **classes)
        model = SiglipForImageClassification(config)
    model.set_attn_implementation("eager")  # at these lengths it trains faster than SDPA on a CPU
    return model


def draw_batch(
    pixels: torch.Tensor, labels: torch.Tensor, stage: FormStage, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's part of its epoch's order: normalised pixels [B, 3, SIDE, SIDE], moved, and
    classes [B].
    """
    each = len(pixels) // stage.batch
    order = torch.randperm(len(pixels), generator=generator(stage.seed, "epoch", step // each))
    chosen = order[step % each * stage.batch :][: stage.batch]
    made = F.pad((pixels[chosen].float() / 255 - MEAN) / STD, [SHIFT] * 4, mode="replicate")
    g = generator(stage.seed, "shift", step)
    corners = torch.randint(2 * SHIFT + 1, (len(made), 2), generator=g).tolist()
    cut = [one[:, y : y + SIDE, x : x + SIDE] for one, (y, x) in zip(made, corners, strict=True)]
    return torch.stack(cut), labels[chosen]


class VitRecipe(Recipe[FormStage]):
    @staticmethod
    def options(add: Callable[..., Any]) -> None:
        add("--seeds", type=int, default=3, help="how many trainings of each form")
        forms = {"nargs": "+", "choices": FORMS, "default": list(FORMS)}
        add("--forms", **forms, help="only these, and what they begin with")
        heads = ("mean", "class")
        add("--head", choices=heads, default="mean", help="what the answer is read from")

    def __init__(self, args: argparse.Namespace) -> None:
        wanted = {name for form in args.forms for name in (form, FORMS[form].begins)}
        forms = [form for form in FORMS.values() if form.name in wanted]
        stages = [stage_of(form, seed) for seed in range(args.seeds) for form in forms]
        super().__init__(args, stages)
        if self.work is None:
            raise SystemExit("--work: expected a folder for pictures and models, got none")
        self.head, self.names, count, held_out = args.head, list(NAMES), PICTURES, HELD_OUT
        if self.smoke:
            self.names, count, held_out = self.names[:3], 16, 12
        self._check_folder()
        folder = self.work / "pictures"
        if len(list(folder.glob("*/*.png"))) < held_out:
            self.draw(folder, held_out)
        self.data = training_set(self.work, count, self.names)

    def _check_folder(self) -> None:
        """Raises SystemExit where the folder was begun with another head or other classes."""
        about, note = (
            json.dumps({"head": self.head, "classes": self.names}),
            self.work / "task.json",
        )
        if note.exists() and note.read_text(encoding="utf-8") != about:
            raise SystemExit(
                f"--work {self.work}: expected what it was begun with,"
                f" {note.read_text(encoding='utf-8')}; choose another"
            )
        write_atomically(note, about.encode())

    def seed_of(self, stage: FormStage) -> int:
        return stage.seed

    def new_model(self, stage: FormStage) -> PreTrainedModel:
        return new_model(self.names, self.head)

    def before(self, stage: FormStage) -> FormStage | None:
        begins = stage.form.begins
        return next((s for s in self.stages if s.name == f"{begins}-{stage.seed}"), None)

    def begin(self, stage: FormStage, model: PreTrainedModel) -> None:
        before = self.before(stage)
        if before:
            model.load_state_dict(self.learned(before).state_dict())
        if stage.form.merging:
            apply_mame(model, **stage.form.merging)

    def optimizer(self, stage: FormStage, model: PreTrainedModel) -> torch.optim.Optimizer:
        return muon(model, lambda name: ".layers." in name, decay=0.05)

    def loss(self, stage: FormStage, model: PreTrainedModel, step: int) -> torch.Tensor:
        pixels, labels = draw_batch(*self.data, stage, step)
        with mixed_precision():
            logits = model(pixels).logits
        return F.cross_entropy(logits.float(), labels, label_smoothing=0.1)

    def train(self, stage: FormStage) -> None:
        """Trains one form, and writes it where the suite `trained` looks for it."""
        super().train(stage)
        folder = self.work / "models" / stage.name
        if not (folder / "training.json").exists():
            self.export(folder, stage, {})

    def export(self, folder: Path, stage: FormStage, origin: dict[str, str]) -> None:
        """Writes the model in transformers' format, with its image processor and, last, how it was
        trained.
        """
        self.learned(stage).save_pretrained(folder)
        size = {"height": SIDE, "width": SIDE}
        processor = ViTImageProcessorPil(size=size, image_mean=[MEAN] * 3, image_std=[STD] * 3)
        processor.save_pretrained(folder)
        about = {
            "form": stage.form.name,
            "seed": stage.seed,
            "steps": stage.steps,
            "merging": stage.form.merging,
        }
        write_atomically(folder / "training.json", f"{json.dumps(about)}\n".encode())

    def pictures(self, each: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Held-out pictures in class folders, ``each`` of them in all."""
        for number in track(range(each), f"drawing {each} held-out pictures"):
            pixels, label = drawn("held-out", number, self.names, held_out=True)
            yield f"{self.names[label]}/{number:05d}.png", lambda pixels=pixels: pixels


if __name__ == "__main__":
    run(VitRecipe, __doc__)
