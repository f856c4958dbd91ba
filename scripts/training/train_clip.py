"""Train the embedded CLIP on a CPU: a small ViT and a text encoder that tell 180 glyphs apart.

    python -m scripts.training.train_clip --work out/clip                   # stop, start at will
    python -m scripts.training.train_clip --work out/clip --until tokens64  # up to this stage
    python -m scripts.training.train_clip --work out/clip --export DIR      # newest checkpoint
    python -m scripts.training.train_clip --draw DIR                        # held-out pictures
    python -m scripts.training.train_clip --smoke --work DIR                # all of it in a minute

`--export` writes transformers' format. `--draw` writes class folders for `mame-sd-eval classify`;
with `--plain` the glyphs are not crowded. `--smoke` writes DIR/model.

The recipe is that of the other embedded models: coarse first. 64 patches of pictures at half the
side learn glyphs and words; 256 patches at the full side see the small ones. Pictures are drawn
anew at each step (`pictures.py`): one glyph at a free place, size and angle, partly hidden, on
varied grounds. The text half starts as the embedded model's, which knows the words. The last stage
strews halves of other glyphs over the one that is named, so that few tokens are redundant. It
leaves the text half as it is.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CLIPImageProcessorPil, CLIPModel

from mame_sd.embedded import model as subjects
from scripts.training import contrast, joint, pictures
from scripts.training.contrast import MEAN, STD, ClipStage
from scripts.training.recipe import Recipe, finish_export, run
from scripts.training.text import Tokens


def stage(name: str, side: int, **more: Any) -> ClipStage:
    return ClipStage(name=name, side=side, **more)


STAGES = (
    stage("tokens64", 128, steps=3000, batch=64, negatives=128, lr=0.01),
    stage("tokens256", 256, steps=850, batch=32, negatives=160, lr=0.004),
    stage(
        "crowd256", 256, steps=450, batch=32, lr=0.003, decay=0.6, crowd=120, ramp=1, locked=True
    ),
)


class ClipRecipe(Recipe[ClipStage]):
    """The recipe of the embedded CLIP."""

    @staticmethod
    def options(add: Callable[..., Any]) -> None:
        add("--plain", action="store_true", help="--draw: glyphs alone, without a crowd of pieces")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, STAGES, batch=4, negatives=4)
        self.names = subjects.glyph_names()[: 6 if self.smoke else None]
        self.crowd = None if args.plain else pictures.CROWD
        self.tokens = Tokens(joint.joint_tokenizer())

    def new_model(self, stage: ClipStage) -> CLIPModel:
        return contrast.new_model(stage, self.tokens.tokenizer)

    def begin(self, stage: ClipStage, model: CLIPModel) -> None:
        before = self.before(stage)
        if before:
            contrast.grow(self.learned(before), model)

    def optimizer(self, stage: ClipStage, model: CLIPModel) -> torch.optim.Optimizer:
        for part in (model.text_model, model.text_projection):
            part.requires_grad_(not stage.locked)
        return joint.optimizer_for(model)

    def loss(self, stage: ClipStage, model: CLIPModel, step: int) -> torch.Tensor:
        batch = contrast.draw_batch(self.names, stage, self.seed, step)
        return contrast.contrastive_loss(model, self.tokens, stage, batch)

    def export(self, folder: Path, stage: ClipStage, origin: dict[str, str]) -> None:
        """Write the model in half precision with tokenizer and image processor."""
        self.learned(stage).half().save_pretrained(folder)
        self.tokens.tokenizer.save_pretrained(folder)
        size = {"height": stage.side, "width": stage.side}
        CLIPImageProcessorPil(
            size=size, do_center_crop=False, image_mean=[MEAN] * 3, image_std=[STD] * 3
        ).save_pretrained(folder)
        finish_export(folder, origin)

    def pictures(self, each: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Yield held-out pictures in class folders, ``each`` of them of a glyph."""

        def drawn(name: str, number: int) -> np.ndarray:
            rng = pictures.rng_of(self.seed, f"drawn {name}", number)
            return pictures.draw(rng, (name,), held_out=True, crowd=self.crowd)[0]

        for name in self.names:
            for number in range(each):
                yield f"{name}/{number:04d}.png", partial(drawn, name, number)


if __name__ == "__main__":
    run(ClipRecipe, __doc__)
