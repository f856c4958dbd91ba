"""Train what joins a DINOv2-S to SmolLM2 so that it captions pictures of cards: a mini LLaVA.

    python -m scripts.training.train_captioner --work out/llava              # stop, start at will
    python -m scripts.training.train_captioner --work out/llava --export DIR # write the newest
    python -m scripts.training.train_captioner --draw out/cards --each 60    # to measure on

The tower and the language model are fetched and stay as they are. LLaVA's projector is trained, and
updates of rank `RANK` of the language model's queries and values. First each patch learns the words
of what it shows; no language model runs, so that takes minutes. Then captions are learnt through
the language model. The tower's features are computed once and kept in `--work`.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mame_sd.eval.captions.model import MINI
from mame_sd.eval.networks.pretrained import (
    DEVIATION,
    MEAN,
    load_dinov2,
    load_smollm2,
)
from scripts.training import cards
from scripts.training.loop import Stage, checkpoint, generator
from scripts.training.recipe import Recipe, run

SIDE, GRID = 126, 9  # pixels and patches
LAYER = -4  # hidden state that the projector reads: its patches say most about colour and object
PICTURES = 3000
RANK = 8
PROMPT = "\n"
WORDS = Stage(
    name="words", steps=1200, batch=12, lr=1e-3, warmup=50, decay=0.5, least=0.0, ema=None
)
CAPTIONS = Stage(
    name="captions", steps=200, batch=4, lr=2e-3, warmup=20, decay=0.5, least=0.02, ema=None
)


def pixels_of(picture: np.ndarray) -> Tensor:
    """[3, SIDE, SIDE] of a picture [side, side, 3], normalised."""
    small = Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.asarray(small, np.float32) / 255).permute(2, 0, 1)
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


def features(work: Path, chunk: int = 250) -> Tensor:
    """[PICTURES, patches, width] of the training pictures, float16, made in parts that are kept."""
    tower, parts = None, []
    for start in range(0, PICTURES, chunk):
        path = work / f"features-{start}.safetensors"
        if not path.exists():
            tower = tower or load_dinov2()
            tower.encoder.layer = tower.encoder.layer[: 13 + LAYER]
            found = []
            for first in range(start, start + chunk, 25):
                scenes = [cards.draw(0, "train", first + i) for i in range(25)]
                x = torch.stack([pixels_of(cards.render(scene)) for scene in scenes])
                with torch.inference_mode():
                    states = tower(x, output_hidden_states=True).hidden_states[-1]
                found.append(states[:, 1:].half().clone())
            save_file({"x": torch.cat(found)}, path)
            print(f"features {start + chunk} of {PICTURES}", flush=True)
        parts.append(load_file(path)["x"])
    return torch.cat(parts)


class Updated(nn.Module):
    """A linear layer with an update of low rank beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(RANK, inner.in_features) / inner.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(inner.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.T @ self.up.T


def make_projector(x: Tensor, width: int) -> nn.Sequential:
    """LLaVA's projector; its first layer begins on features of mean 0 and deviation 1."""
    first, second = nn.Linear(x.shape[-1], width), nn.Linear(width, width)
    some = x[::20].float().flatten(0, 1)
    with torch.no_grad():
        first.weight /= some.std(0)
        first.bias -= first.weight @ some.mean(0)
    return nn.Sequential(first, nn.GELU(), second)


def words_of(scenes: list[cards.Cards], tokenizer, table: Tensor) -> Tensor:
    """[pictures, patches, width]: the mean of the words' vectors of what most of a patch shows."""
    known: dict[str, Tensor] = {}

    def vector(words: str) -> Tensor:
        if words not in known:
            known[words] = table[tokenizer(" " + words)["input_ids"]].mean(0)
        return known[words]

    targets = []
    for scene in scenes:
        owners = torch.from_numpy(scene.owners())
        shown = torch.stack([(owners == n).float() for n in range(-1, len(scene.cards))])
        most = F.adaptive_avg_pool2d(shown, (GRID, GRID)).argmax(0).flatten()
        rows = [vector(scene.ground.phrase)]
        rows += [(vector(card.name) + vector(card.color)) / 2 for card in scene.cards]
        targets.append(torch.stack(rows)[most])
    return torch.stack(targets)


class CaptionerRecipe(Recipe[Stage]):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, (WORDS, CAPTIONS))
        if args.draw or args.export:
            return
        self.features = features(self.work)
        self.language, self.tokenizer = load_smollm2()
        self.language.requires_grad_(False)
        torch.set_grad_enabled(True)
        self.table = self.language.get_input_embeddings().weight
        self.scenes = [cards.draw(self.seed, "train", i) for i in range(len(self.features))]
        self.targets = words_of(self.scenes, self.tokenizer, self.table)

    def new_model(self, stage: Stage) -> nn.ModuleDict:
        """The projector, and the updates of the language model, in which they are put."""
        projector = make_projector(self.features, self.table.shape[1])
        low = nn.ParameterList()
        for layer in self.language.model.layers:
            for name in ("q_proj", "v_proj"):
                own = getattr(layer.self_attn, name)
                updated = Updated(own.inner if isinstance(own, Updated) else own)
                setattr(layer.self_attn, name, updated)
                low.extend([updated.down, updated.up])
        return nn.ModuleDict({"projector": projector, "low": low})

    def begin(self, stage: Stage, model: nn.ModuleDict) -> None:
        if stage.name == CAPTIONS.name:
            words = checkpoint(self.work, WORDS)["ema"]
            model.load_state_dict(words)

    def optimizer(self, stage: Stage, model: nn.ModuleDict) -> torch.optim.Optimizer:
        if stage.name == WORDS.name:
            return torch.optim.AdamW(model["projector"].parameters(), weight_decay=0.01)
        projector = {"params": [*model["projector"].parameters()], "share": 0.25}
        return torch.optim.AdamW([projector, {"params": [*model["low"]]}], weight_decay=0.0)

    def loss(self, stage: Stage, model: nn.ModuleDict, step: int) -> Tensor:
        of_stage = self._word_loss if stage.name == WORDS.name else self._caption_loss
        return of_stage(stage, model["projector"], step)

    def _word_loss(self, stage: Stage, projector: nn.Module, step: int) -> Tensor:
        """Each patch says the words of what it shows."""
        spread = self.targets[:100].flatten(0, 1).var(0).mean()
        g = generator(self.seed, stage.name, step)
        rows = torch.randint(len(self.features), (stage.batch,), generator=g)
        return F.mse_loss(projector(self.features[rows].float()), self.targets[rows]) / spread

    def _caption_loss(self, stage: Stage, projector: nn.Module, step: int) -> Tensor:
        """The language model says the caption."""
        count, end = len(self.features), self.tokenizer.eos_token_id
        each = count // stage.batch
        order = torch.randperm(count, generator=generator(self.seed, "epoch", step // each))
        rows = order[step % each * stage.batch :][: stage.batch]
        captions = [self.scenes[i].caption for i in rows.tolist()]
        ids = [self.tokenizer(caption)["input_ids"] + [end] for caption in captions]
        prompt, longest = self.tokenizer(PROMPT)["input_ids"], max(map(len, ids))
        text = torch.tensor([prompt + one + [end] * (longest - len(one)) for one in ids])
        goal = torch.tensor([one + [-100] * (longest - len(one)) for one in ids])
        shown = projector(self.features[rows].float())
        embeds = torch.cat([shown, F.embedding(text, self.table)], 1)
        hidden = self.language.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        logits = self.language.lm_head(hidden[:, -longest - 1 : -1])
        return F.cross_entropy(logits.flatten(0, 1), goal.flatten())

    def export(self, folder: Path, stage: Stage, origin: dict[str, str]) -> None:
        """Writes what joins the two models, float16, as `mame-sd-eval caption --model` takes it."""
        layers = {"0": "linear_1", "2": "linear_2"}
        names = [f"layers.{n}.self_attn.{one}" for n in range(30) for one in ("q_proj", "v_proj")]
        tensors = {}
        for name, value in checkpoint(self.work, stage)["model"].items():
            part, number, *rest = name.split(".")
            if part == "projector":
                tensors[f"projector.{layers[number]}.{rest[0]}"] = value
            else:
                place, which = divmod(int(number), 2)
                tensors[f"{names[place]}.{('down', 'up')[which]}"] = value
        folder.mkdir(parents=True, exist_ok=True)
        halves = {name: value.half().contiguous() for name, value in tensors.items()}
        save_file(halves, folder / MINI, origin)

    def draw(self, folder: Path, each: int) -> None:
        """Writes pictures that none is trained on, and references.json beside them."""
        super().draw(folder, each)
        images, annotations = [], []
        for number in range(each):
            scene = cards.draw(self.seed, "test", number)
            things = [[card.name, card.color] for card in scene.cards]
            images.append({"id": number, "file_name": f"{number:04}.png", "things": things})
            annotations += [{"image_id": number, "caption": text} for text in scene.references]
        content = {"images": images, "annotations": annotations}
        (folder / "references.json").write_text(json.dumps(content, indent=1) + "\n")

    def pictures(self, each: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        for number in range(each):
            scene = cards.draw(self.seed, "test", number)
            yield f"{number:04}.png", partial(cards.render, scene)


if __name__ == "__main__":
    run(CaptionerRecipe, __doc__)
