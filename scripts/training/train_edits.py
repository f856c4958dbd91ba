"""Train the instrument of edits (`mame_sd.eval.instruments.edits`) on a CPU.

    python -m scripts.training.train_edits --work DIR                   # half an hour, one core
    python -m scripts.training.train_edits --work DIR --export WEIGHTS  # newest checkpoint, in int8
    python -m scripts.training.train_edits --work DIR --smoke           # all of it in a minute

The training begins with the embedded transformer, and trains the layers that compute images alone.
It sees windows of 16 x 16 of the 32 x 32 tokens, at a seventh of the cost of whole pictures.

Three pictures form a set: an object on a ground, the same object on another ground, and another
object at the same place on the first ground. One of them is the reference, and the caption of
another says what the edit should show. Half of the samples are copies of the reference, without a
caption, since a model that is given the caption alone predicts much of the picture.

The shipped weights are of 600 steps. Their first 267 steps had batches of 8, a learning rate of
.003, and fewer copies.
"""

import argparse
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from mame_sd.embedded import model as subjects
from mame_sd.embedded.scenes import SUBJECTS
from mame_sd.eval.instruments.edits import GRID, PATCH, Editor, captions_states
from mame_sd.runs.files import written_whole
from scripts.training import world
from scripts.training.instruments import save_weights
from scripts.training.joint import draw_sigmas
from scripts.training.loop import Stage, generator, mixed_precision, muon
from scripts.training.pictures import rng_of
from scripts.training.pool import MARGIN, load_autoencoder, room
from scripts.training.recipe import Recipe, run

SHIFT = 4.0  # of the noise levels, and of the samples' times
SHARD = 16  # sets of three pictures
EVERY = 50  # steps from one held-out loss to the next
HELD_OUT = 16
COPIES = 0.5  # share of the samples that are the reference itself, without a caption


@dataclass(frozen=True, kw_only=True)
class EditStage(Stage):
    """A stage that learns from parts of `side` x `side` latents, of `sets` sets of pictures."""

    side: int
    sets: int


STAGES = (EditStage(name="parts", steps=600, batch=6, lr=0.006, ema=0.98, side=32, sets=192),)


def draw_set(rng: np.random.Generator, glyphs: int, held_out: bool) -> list[world.Scene]:
    """Draw a scene, the same with another ground, and the same with another object.

    If `held_out`, the first is a pair that is never trained on. All others are.
    """
    first = world.draw_scene(rng, glyphs, held_out=held_out)
    while True:
        ground = world.draw_ground(rng)
        glyph = subjects.glyph_names().index(SUBJECTS[int(rng.integers(glyphs))])
        second = replace(first, ground=ground)
        third = replace(first, subject=replace(first.subject, glyph=glyph))
        new = ground.phrase != first.ground.phrase and glyph != first.subject.glyph
        if new and not second.held_out and not third.held_out:
            return [first, second, third]


@dataclass
class Sets:
    """Sets of three pictures, each a function of (seed, number), encoded on first use."""

    folder: Path
    seed: int
    glyphs: int
    held_out: bool = False
    latents: list[torch.Tensor] = field(default_factory=list)  # [3, 4, 80, 80]
    rooms: list[list[int]] = field(default_factory=list)
    captions: list[list[str]] = field(default_factory=list)

    def grow(self, sets: int) -> None:
        """Hold the first `sets` sets (whole shards)."""
        kind = "held-out" if self.held_out else "edits"
        while len(self.captions) < sets:
            number = len(self.captions) // SHARD
            path = self.folder / f"{kind}-{number:05d}.npz"
            rng = rng_of(self.seed, kind, number)
            drawn = [draw_set(rng, self.glyphs, self.held_out) for _ in range(SHARD)]
            if not path.exists():
                with written_whole(path) as file:
                    np.savez(file, latents=np.stack([encoded(scenes) for scenes in drawn]))
            with np.load(path) as shard:
                self.latents.extend(torch.from_numpy(shard["latents"]))
            for scenes in drawn:
                self.rooms.append([min(ends) for ends in zip(*map(room, scenes), strict=True)])
                self.captions.append([scene.caption for scene in scenes])

    def window(self, index: int, u: float, v: float) -> torch.Tensor:
        """Return a set's latents [3, 4, 64, 64], moved within its room by shares u and v."""
        left, right, up, down = self.rooms[index]
        side, middle = world.SIDE // 4, MARGIN // 4
        x = middle - right + int(u * (left + right + 1))
        y = middle - down + int(v * (up + down + 1))
        return self.latents[index][:, :, y : y + side, x : x + side].float()


_autoencoder = cache(load_autoencoder)


@torch.no_grad()
def encoded(scenes: list[world.Scene]) -> np.ndarray:
    """Return latents of scenes with a margin, [n, 4, 80, 80] in fp16."""
    vae = _autoencoder()
    pixels = torch.from_numpy(np.stack([world.render(scene, MARGIN) for scene in scenes]))
    images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    with mixed_precision():
        latents = vae.encode(images.to(memory_format=torch.channels_last)).latents
    return (latents.half() * vae.config.scaling_factor).contiguous().numpy()


def trained(name: str) -> bool:
    """Return True if the instrument's training moves a weight of that name: those of images."""
    text = ("context", "norm1", "add_", "added", "time_text_embed")
    return not any(part in name for part in text)


class EditRecipe(Recipe[EditStage]):
    """The recipe of the editor."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, STAGES, sets=SHARD)
        glyphs = 8 if self.smoke else len(SUBJECTS)
        self.sets = Sets(self.work / "sets", self.seed, glyphs)
        self.held_out = Sets(self.work / "sets", self.seed, glyphs, held_out=True)
        self.states: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def new_model(self, stage: EditStage) -> Editor:
        model = Editor()
        for name, weight in model.named_parameters():
            weight.requires_grad_(trained(name))
        return model

    def optimizer(self, stage: EditStage, model: Editor) -> torch.optim.Optimizer:
        return muon(model, lambda name: trained(name) and "transformer_blocks" in name)

    def words(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states of captions, each computed once."""
        new = [caption for caption in captions if caption not in self.states]
        if new:
            for caption, *states in zip(new, *captions_states(new), strict=True):
                self.states[caption] = states[0], states[1]
        words, pooled = zip(*(self.states[caption] for caption in captions), strict=True)
        return torch.stack(words), torch.stack(pooled)

    def loss(self, stage: EditStage, model: Editor, step: int) -> torch.Tensor:
        if step % EVERY == 0:
            print(f"held out: {self.held_out_losses(stage, model)}", flush=True)
        self.sets.grow(stage.sets)
        g = generator(self.seed, stage.name, step)
        clean, reference, captions = [], [], []
        for pick, u, v, one, other in torch.rand(stage.batch, 5, generator=g).tolist():
            index, target = int(pick * stage.sets), int(one * 3)
            pictures = self.sets.window(index, u, v)
            clean.append(pictures[target])
            if other < COPIES:
                reference.append(pictures[target])
                captions.append("")
                continue
            reference.append(pictures[(target + 1 + int(2 * (other - COPIES) / (1 - COPIES))) % 3])
            captions.append(self.sets.captions[index][target])
        corner = torch.randint(GRID - stage.side // PATCH + 1, (2,), generator=g).tolist()
        latents, references = torch.stack(clean), torch.stack(reference)
        return flow_loss(model, latents, references, self.words(captions), stage, corner, g)

    @torch.no_grad()
    def held_out_losses(self, stage: EditStage, model: Editor) -> dict[str, float]:
        """Return the held-out loss with the reference, and with one of another set."""
        count = 4 if self.smoke else HELD_OUT
        self.held_out.grow(count)
        pictures = torch.stack([self.held_out.window(i, 0.5, 0.5) for i in range(count)])
        words = self.words([self.held_out.captions[i][0] for i in range(count)])
        own = pictures[range(count), [1 + i % 2 for i in range(count)]]
        found, corner = {}, [(GRID - stage.side // PATCH) // 2] * 2
        for name, references in (("own", own), ("another's", own.roll(1, 0))):
            g = generator(self.seed, "held out", 0)
            loss = flow_loss(model, pictures[:, 0], references, words, stage, corner, g)
            found[name] = round(loss.item(), 4)
        return found

    def export(self, folder: Path, stage: EditStage, origin: dict[str, str]) -> None:
        """Write what was trained in int8."""
        weights = self.learned(stage).model.state_dict()
        moved = {name: value for name, value in weights.items() if trained(name)}
        folder.mkdir(parents=True, exist_ok=True)
        save_weights("edits", moved, folder)


def flow_loss(
    model: Editor,
    clean: torch.Tensor,
    references: torch.Tensor,
    words: tuple[torch.Tensor, torch.Tensor],
    stage: EditStage,
    corner: list[int],
    g: torch.Generator,
) -> torch.Tensor:
    """Return the mean squared error of the velocity, in a part of pictures [B, 4, 64, 64]."""
    row, column = (PATCH * at for at in corner)
    part = (..., slice(row, row + stage.side), slice(column, column + stage.side))
    clean, references = clean[part], references[part]
    noise = torch.randn(clean.shape, generator=g)
    sigma = draw_sigmas(len(clean), SHIFT, g)
    s = sigma[:, None, None, None]
    noisy = (1 - s) * clean + s * noise
    at = (corner[0], corner[1])
    with mixed_precision():
        predicted = model(noisy, sigma, references[:, None], *words, at)
    return F.mse_loss(predicted.float(), noise - clean)


if __name__ == "__main__":
    run(EditRecipe, __doc__)
