"""Tiny vision transformers saved as folders, and folders of drawn images in classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from safetensors.torch import save_file

from tests.builders.perception import ROWS, SIDE
from tests.builders.tiny import seeded, tiny_tokenizer

CLASSES = ("ant", "bee_fly", "cat")
COLORS = ((220, 40, 30), (30, 160, 60), (40, 60, 220))


def save_classifier(folder: Path, name: str = "ViTForImageClassification") -> Path:
    """Save a tiny model of `tests.builders.perception` with CLASSES and an image processor."""
    config = next(row for row in ROWS if row.name == name).build().config.to_dict()
    kind: Any = getattr(transformers, name)
    names = dict(enumerate(CLASSES))
    config.update(id2label=names, label2id={text: n for n, text in names.items()})
    seeded(kind, 0, kind.config_class(**config)).save_pretrained(folder)
    save_processor(folder, config["image_size"], video="Video" in name)
    return folder


def save_timm(folder: Path) -> Any:
    """Save a tiny VisionTransformer of timm as its hub has models, and return it."""
    import timm

    sizes = {"img_size": SIDE, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
    pixels = {"input_size": [3, SIDE, SIDE], "crop_pct": 0.9, "mean": [0.5] * 3, "std": [0.25] * 3}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": len(CLASSES)}
    model = seeded(timm.create_model, 0, config["architecture"], num_classes=len(CLASSES), **sizes)
    folder.mkdir()
    about = {**config, "model_args": sizes, "pretrained_cfg": {**pixels, **config}}
    (folder / "config.json").write_text(json.dumps(about))
    save_file(model.state_dict(), folder / "model.safetensors")
    return model


def save_text_model(folder: Path, name: str = "CLIPModel") -> Path:
    """Save a tiny CLIP or SigLIP over single bytes, with tokenizer and image processor."""
    kind: Any = getattr(transformers, name)
    tokenizer = tiny_tokenizer()
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 1,
    }
    text = {**small, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    vision = {**small, "num_hidden_layers": 4, "image_size": SIDE, "patch_size": 4}
    seeded(kind, 0, kind.config_class(text_config=text, vision_config=vision)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    save_processor(folder)
    return folder


def save_processor(folder: Path, side: int = SIDE, video: bool = False) -> None:
    """Save an image processor to `side` pixels, of frames for a `video`."""
    size: dict[str, Any] = {"size": {"height": side, "width": side}}
    if video:
        size |= {"crop_size": size["size"], "do_center_crop": False}
        transformers.VideoMAEImageProcessorPil(**size).save_pretrained(folder)
    else:
        transformers.ViTImageProcessorPil(**size).save_pretrained(folder)


def draw_classes(folder: Path) -> Path:
    """Class folders of four images: patches of noise around a colour of the class."""
    rng = np.random.default_rng(0)
    for name, color in zip(CLASSES, COLORS, strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            noise = rng.integers(-40, 41, (8, 8, 1)).repeat(4, 0).repeat(4, 1)
            pixels = np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder
