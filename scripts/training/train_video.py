"""Train the embedded video classifier: a small VideoMAE that says which glyph moves and how.

    python -m scripts.training.train_video --work out/video                 # stop, start at will
    python -m scripts.training.train_video --work out/video --export DIR    # write the newest
    python -m scripts.training.train_video --draw out/clips --each 20       # clips to measure on

One batch in four is of smaller frames, one in four lacks tubelets: a rival that sees these is no
stranger to the model. Merging is never trained on. Beside the answer, each token learns which glyph
it shows and how that moves; this head is thrown away.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import VideoMAEConfig, VideoMAEForVideoClassification, VideoMAEImageProcessorPil

from scripts.training import clips
from scripts.training.clips import CLASSES, FRAMES, MOTIONS, NAMES, SIDE
from scripts.training.contrast import MEAN, STD
from scripts.training.loop import Stage, generator, muon
from scripts.training.recipe import Recipe, finish_export, run

PATCH, TUBELET = 8, 2  # pixels; frames
WIDTH, BLOCKS, HEADS, MLP = 96, 6, 3, 192
GRID, DEPTH = SIDE // PATCH, FRAMES // TUBELET
SMALLER = (40, 48, 56)  # pixels
SHARE = 0.25  # of the batches that are smaller, or shorter
DENSE = len(CLASSES) + len(NAMES) + 1  # what a token may show: what moves how, what stands, ground
COVERED = 0.3  # of a token's pixels, from which on it shows a glyph
STAGES = (
    Stage(name="video", steps=2400, batch=48, lr=0.02, warmup=50, decay=0.6, least=0.02, ema=0.998),
)


def new_model() -> VideoMAEForVideoClassification:
    """The classifier, random weights."""
    config = VideoMAEConfig(
        image_size=SIDE,
        patch_size=PATCH,
        num_frames=FRAMES,
        tubelet_size=TUBELET,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        intermediate_size=MLP,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: n for n, name in enumerate(CLASSES)},
    )
    return VideoMAEForVideoClassification(config)


class Learner(nn.Module):
    """The classifier and the head that is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()
        self.dense = nn.Linear(WIDTH, DENSE)

    def forward(self, pixels: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, classes] and of each token [B, L, DENSE]; `places`: of the tokens that are
        seen, among those of full size.
        """
        inner = self.model.videomae
        x = inner.embeddings.patch_embeddings.projection(pixels.transpose(1, 2))
        depth, side = x.shape[2], x.shape[-1]
        every = torch.arange(depth * side * side).view(depth, side, side)
        nearest = ((torch.arange(side) + 0.5) * GRID / side).long()
        at = torch.arange(DEPTH * GRID * GRID).view(DEPTH, GRID, GRID)[:, nearest][:, :, nearest]
        x = x.flatten(2).transpose(1, 2) + inner.embeddings.position_embeddings[:, at.flatten()]
        x = inner.encoder(x[:, every[places].flatten()]).last_hidden_state
        return self.model.classifier(self.model.fc_norm(x.mean(1))), self.dense(x)


def shown_by_tokens(shown: Tensor, batch: list[clips.Clip], side: int) -> Tensor:
    """What each token shows [B, DEPTH, side, side], as a number below DENSE."""
    marks = torch.stack([(shown == n).float() for n in (1, 2)], 1)
    parts = F.adaptive_avg_pool3d(marks, (DEPTH, side, side))
    most, which = parts.max(1)
    moving = torch.tensor([clip.label for clip in batch])[:, None, None, None]
    standing = torch.tensor([len(CLASSES) + c.standing for c in batch])[:, None, None, None]
    glyph = torch.where(which == 0, moving, standing)
    return torch.where(most > COVERED, glyph, DENSE - 1)


class VideoRecipe(Recipe[Stage]):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, STAGES)

    def new_model(self, stage: Stage) -> Learner:
        return Learner()

    def optimizer(self, stage: Stage, model: Learner) -> torch.optim.Optimizer:
        return muon(model, lambda name: ".layer." in name, decay=0.02)

    def loss(self, stage: Stage, model: Learner, step: int) -> Tensor:
        batch = [clips.draw(self.seed, "train", step * stage.batch + n) for n in range(stage.batch)]
        frames, shown = clips.render(batch)
        g = generator(self.seed, stage.name, step)
        kind = torch.rand((), generator=g).item()
        side, places = SIDE, torch.arange(DEPTH)
        if kind < SHARE:
            side = SMALLER[int(torch.randint(len(SMALLER), (), generator=g))]
            frames = F.interpolate(
                frames.flatten(0, 1), (side, side), mode="bicubic", antialias=True
            )
            frames = frames.unflatten(0, (stage.batch, FRAMES))
        elif kind < 2 * SHARE:
            left = int(torch.randint(2, DEPTH, (), generator=g))
            places = torch.randperm(DEPTH, generator=g)[:left].sort().values
        pixels = (frames.round() / 255 - MEAN) / STD
        logits, tokens = model(pixels, places)
        seen = shown_by_tokens(shown, batch, side // PATCH)[:, places].flatten(1)
        labels = torch.tensor([clip.label for clip in batch])
        chances = logits.float().log_softmax(-1).unflatten(-1, (len(NAMES), len(MOTIONS)))
        weights = torch.ones(DENSE)
        weights[-1] = 0.2  # most tokens show the ground
        return (
            F.nll_loss(chances.flatten(1), labels)
            + 0.5 * F.nll_loss(chances.logsumexp(2), labels // len(MOTIONS))
            + 0.5 * F.nll_loss(chances.logsumexp(1), labels % len(MOTIONS))
            + F.cross_entropy(tokens.flatten(0, 1), seen.flatten(), weights)
        )

    def export(self, folder: Path, stage: Stage, origin: dict[str, str]) -> None:
        """Writes the classifier in transformers' format, float16, with its processor."""
        self.learned(stage).model.half().save_pretrained(folder)
        size = {"height": SIDE, "width": SIDE}
        VideoMAEImageProcessorPil(
            size=size,
            crop_size=size,
            do_center_crop=False,
            image_mean=[MEAN] * 3,
            image_std=[STD] * 3,
        ).save_pretrained(folder)
        finish_export(folder, origin)

    def pictures(self, each: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Held-out clips, ``each`` of every class: folders of frames in class folders."""
        left, index = dict.fromkeys(range(len(CLASSES)), each), 0
        while any(left.values()):
            clip = clips.draw(self.seed, "test", index, held_out=True)
            if left[clip.label]:
                left[clip.label] -= 1
                frames = clips.render([clip])[0][0].round().byte().permute(0, 2, 3, 1).numpy()
                for number in range(FRAMES):
                    name = f"{CLASSES[clip.label]}/{index:05}/{number}.png"
                    yield name, partial(frames.__getitem__, number)
            index += 1


if __name__ == "__main__":
    run(VideoRecipe, __doc__)
