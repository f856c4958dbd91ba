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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
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
from scripts.training import command, joint, pictures, world
from scripts.training.contrast import MEAN, STD
from scripts.training.loop import checkpoint, fit, generator, mixed_precision, muon, train_stages

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


@dataclass(frozen=True)
class Stage:
    """One training of one form: `lr`, `decay` and `warmup` as `joint.learning_rate` reads them."""

    form: Form
    seed: int
    steps: int
    batch: int
    lr: float
    decay: float = 0.4
    warmup: int = 30

    @property
    def name(self) -> str:
        return f"{self.form.name}-{self.seed}"


@dataclass(frozen=True)
class Task:
    """What is learned: the classes, and what the answer is read from, "mean" or "class"."""

    names: list[str]
    head: str


def stages(seeds: int, steps: int = STEPS, tuning: int = TUNING, batch: int = BATCH) -> list[Stage]:
    """Every form of the first seed, then of the next."""
    return [
        Stage(
            form,
            seed,
            tuning if form.begins else steps,
            batch,
            TUNING_RATE if form.begins else RATE,
        )
        for seed in range(seeds)
        for form in FORMS.values()
    ]


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
    return small(pixels), names.index(subjects.glyph_names()[scene.placed[0].glyph])


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
        return torch.from_numpy(found["pixels"]).permute(0, 3, 1, 2), torch.from_numpy(
            found["labels"]
        )


def draw_held_out(out: Path, count: int, names: list[str]) -> None:
    """`count` held-out pictures in class folders; those that are there stay."""
    for number in track(range(count), f"drawing {count} held-out pictures"):
        if not any(out.glob(f"*/{number:05d}.png")):
            pixels, label = drawn("held-out", number, names, held_out=True)
            file = out / names[label] / f"{number:05d}.png"
            with written_whole(file) as stream:
                Image.fromarray(pixels).save(stream, "PNG")


def new_model(task: Task) -> PreTrainedModel:
    """ViT-Ti with 64 patches, unmerged. transformers' SigLIP is the plain ViT that answers by the
    mean over tokens.
    """
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    names = {
        "id2label": dict(enumerate(task.names)),
        "label2id": {name: n for n, name in enumerate(task.names)},
    }
    if task.head == "class":
        model: PreTrainedModel = ViTForImageClassification(ViTConfig(**sizes, **names))
    else:
        model = SiglipForImageClassification(
            SiglipConfig(
                text_config=NO_TEXT, vision_config={**sizes, "vision_use_head": False}, **names
            )
        )
    model.set_attn_implementation("eager")  # at these lengths it trains faster than SDPA on a CPU
    return model


def draw_batch(
    pixels: torch.Tensor, labels: torch.Tensor, stage: Stage, step: int
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


def load_average(work: Path, stage: Stage, task: Task) -> PreTrainedModel:
    model = new_model(task)
    model.load_state_dict(checkpoint(work, stage)["ema"])
    return model.eval()


def train_stage(
    work: Path, stage: Stage, data: tuple[torch.Tensor, torch.Tensor], task: Task
) -> None:
    torch.manual_seed(stage.seed)
    if stage.form.begins:
        model = load_average(work, replace(stage, form=FORMS[stage.form.begins]), task).train()
    else:
        model = new_model(task).train()
    if stage.form.merging:
        apply_mame(model, **stage.form.merging)

    def loss(step: int) -> torch.Tensor:
        pixels, labels = draw_batch(*data, stage, step)
        with mixed_precision():
            logits = model(pixels).logits
        return F.cross_entropy(logits.float(), labels, label_smoothing=0.1)

    fit(
        work / f"{stage.name}.pt",
        stage.name,
        model,
        muon(model, lambda name: ".layers." in name, decay=0.05),
        stage.steps,
        loss,
        lambda step: joint.learning_rate(stage, step),
        ema=0.99,
    )


def export(work: Path, stage: Stage, task: Task) -> None:
    """The model in transformers' format, with its image processor and, written last, how it was
    trained.
    """
    out = work / "models" / stage.name
    if (out / "training.json").exists():
        return
    load_average(work, stage, task).save_pretrained(out)
    size = {"height": SIDE, "width": SIDE}
    ViTImageProcessorPil(size=size, image_mean=[MEAN] * 3, image_std=[STD] * 3).save_pretrained(out)
    about = {
        "form": stage.form.name,
        "seed": stage.seed,
        "steps": stage.steps,
        "merging": stage.form.merging,
    }
    write_atomically(out / "training.json", f"{json.dumps(about)}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for pictures, training state and models")
    add("--seeds", type=int, default=3, help="how many trainings of each form")
    add("--threads", type=int, default=1, help="1 beside other work, 2 on two idle cores")
    add("--until", metavar="STAGE", help="the last stage to train, as last-0; without it, all")
    forms = {"nargs": "+", "choices": FORMS, "default": list(FORMS)}
    add("--forms", **forms, help="only these, and what they begin with")
    add("--head", choices=("mean", "class"), default="mean", help="what the answer is read from")
    add("--smoke", action="store_true", help="a few steps of everything")
    args = parser.parse_args()
    command.begin(args)
    every, task = stages(args.seeds), Task(list(NAMES), args.head)
    count, held_out = PICTURES, HELD_OUT
    if args.smoke:
        every, task = stages(2, steps=1, tuning=1, batch=2), Task(NAMES[:3], args.head)
        count, held_out = 16, 12
    wanted = {name for form in args.forms for name in (form, FORMS[form].begins)}
    every = [stage for stage in every if stage.form.name in wanted]
    known = [stage.name for stage in every]
    if args.until and args.until not in known:
        parser.error(f"--until: expected one of {', '.join(known)}, got {args.until}")
    about, note = json.dumps({"head": task.head, "classes": task.names}), args.work / "task.json"
    if note.exists() and note.read_text(encoding="utf-8") != about:
        parser.error(
            f"--work {args.work}: expected what it was begun with,"
            f" {note.read_text(encoding='utf-8')}; choose another"
        )
    write_atomically(note, about.encode())
    draw_held_out(args.work / "pictures", held_out, task.names)
    data = training_set(args.work, count, task.names)

    def train(stage: Stage, previous: Stage | None) -> None:
        train_stage(args.work, stage, data, task)
        export(args.work, stage, task)

    for stage in train_stages(args.work, every, args.until or known[-1], train):
        export(args.work, stage, task)
    print(f"wrote {args.work / 'models'}")


if __name__ == "__main__":
    main()
