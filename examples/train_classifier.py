"""Train a vision transformer with merging on a folder of images, from scratch or from weights.

    python examples/train_classifier.py --train imagenet/train --val imagenet/val --out out/vit-s \\
        --config facebook/deit-small-patch16-224 --form quarters             # from scratch
    python examples/train_classifier.py --train imagenet/train --val imagenet/val --out out/tuned \\
        --weights facebook/deit-small-patch16-224 --form last --epochs 1     # fine-tuned
    mame-sd-eval classify --model out/vit-s --data imagenet/val --rows mame-quarters-0.5

The settings are those of arXiv 2604.13432, section 4 (table 2): tau .5 in blocks 3, 6 and 9 of 12
(`quarters`) or in the last block (`last`); AdamW, weight decay .05, a cosine with 20 epochs of
warm-up, label smoothing .1, a learning rate of .001 for each 1,024 images of a batch. Of Swin's
recipe, which the paper refers to, mixup, cutmix, RandAugment and stochastic depth are left out:
images are cropped at random and flipped. The unmerged model is trained by `--form plain`.

Run the same command again to continue. `accelerate launch` shares it out.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from mame_sd import apply_mame
from mame_sd.eval.perception.rules import quarters

WARM_UP = 20  # epochs of training from scratch
FORMS = ("plain", "quarters", "last")


class ImageFolder(Dataset[dict[str, Any]]):
    """Images of class folders, as tensors of the processor's size."""

    def __init__(self, folder: Path, processor: Any, augmented: bool) -> None:
        self.classes = sorted(one.name for one in folder.iterdir() if one.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in Image.registered_extensions()
        ]
        if len(self.classes) < 2 or not self.files:
            raise SystemExit(
                f"{folder}: expected a folder of two class folders with images or more"
            )
        self.processor, self.augmented = processor, augmented

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.files[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        if self.augmented:
            image = cropped(image)
        pixels = self.processor(image, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": label}


def cropped(image: Image.Image) -> Image.Image:
    """A random square of 8 to 100 % of the image's area, flipped in half of the cases."""
    side = int(min(image.size) * random.uniform(0.08, 1) ** 0.5)
    left, top = (random.randint(0, whole - side) for whole in image.size)
    image = image.crop((left, top, left + side, top + side))
    return ImageOps.mirror(image) if random.random() < 0.5 else image


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--val", type=Path, required=True, help="the same, to measure on")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and result")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", help="model whose form is trained from scratch")
    source.add_argument("--weights", help="model whose weights are fine-tuned")
    parser.add_argument("--form", choices=FORMS, default="quarters", help="where tokens merge")
    parser.add_argument("--tau", type=float, default=0.5, help="threshold (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="images a device at once")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    name = given.weights or given.config
    processor = AutoImageProcessor.from_pretrained(name)
    train = ImageFolder(given.train, processor, augmented=True)
    val = ImageFolder(given.val, processor, augmented=False)
    if train.classes != val.classes:
        raise SystemExit("--val: expected the class folders of --train, got others")
    labels = dict(enumerate(train.classes))
    names = {"id2label": labels, "label2id": {value: key for key, value in labels.items()}}
    if given.weights:
        model = AutoModelForImageClassification.from_pretrained(
            name, ignore_mismatched_sizes=True, **names
        )
    else:
        config = AutoConfig.from_pretrained(name, **names)
        model = AutoModelForImageClassification.from_config(config)
    merge(model, given.form, given.tau)
    tuned = bool(given.weights)
    images = given.batch_size * int(os.environ.get("WORLD_SIZE", "1"))  # of a step
    arguments = TrainingArguments(
        output_dir=str(given.out / "checkpoints"),
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.batch_size,
        per_device_eval_batch_size=given.batch_size,
        learning_rate=(2e-5 if tuned else 1e-3) * images / 1024,
        weight_decay=0.05,
        label_smoothing_factor=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=0.0 if tuned else min(0.5, WARM_UP / given.epochs),
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        remove_unused_columns=False,
        report_to=[],
        seed=given.seed,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=val,
        compute_metrics=lambda found: {
            "top1": float((np.argmax(found.predictions, 1) == found.label_ids).mean())
        },
    )
    begun = Path(arguments.output_dir).is_dir() and get_last_checkpoint(arguments.output_dir)
    trainer.train(resume_from_checkpoint=begun or None)
    print(trainer.evaluate())
    trainer.save_model(str(given.out))
    processor.save_pretrained(given.out)


def merge(model: Any, form: str, tau: float) -> Any:
    """Merge tokens by the paper's method in the blocks of `form`; gives merging's handle."""
    if form == "plain":
        return None
    depth = model.config.num_hidden_layers
    return apply_mame(model, tau=tau, blocks=quarters(depth) if form == "quarters" else (-1,))


if __name__ == "__main__":
    main()
