"""Train what joins a DINOv2-S to SmolLM2 so that it captions pictures of cards: a mini LLaVA.

    python -m scripts.training.train_captioner --work out/llava              # stop, start at will
    python -m scripts.training.train_captioner --work out/llava --export DIR # write the newest
    python -m scripts.training.train_captioner --pictures out/cards          # to measure on

The tower and the language model are fetched and stay as they are. LLaVA's projector is trained, and
updates of rank `RANK` of the language model's queries and values. First each patch learns the words
of what it shows; no language model runs, so that takes minutes. Then captions are learnt through
the language model. The tower's features are computed once and kept in `--work`.
"""

import argparse
import json
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
from scripts.training.loop import fit, generator

SIDE, GRID = 126, 9  # pixels and patches
LAYER = -4  # hidden state that the projector reads: its patches say most about colour and object
PICTURES, BATCH = 3000, 4
RANK = 8
WORDS, RATE = 1200, 2e-3  # steps of the first training; learning rate of the updates
PROMPT = "\n"


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


def learn_words(work: Path, projector: nn.Module, x: Tensor, targets: Tensor) -> None:
    """The first training: each patch says the words of what it shows."""
    optimizer = torch.optim.AdamW(projector.parameters(), weight_decay=0.01)
    spread = targets[:100].flatten(0, 1).var(0).mean()

    def loss(step: int) -> Tensor:
        rows = torch.randint(len(x), (12,), generator=generator(0, "words", step))
        return F.mse_loss(projector(x[rows].float()), targets[rows]) / spread

    def rate(step: int) -> float:
        return 1e-3 * min(1, (step + 1) / 50, (WORDS - step) / (WORDS / 2))

    fit(work / "words.pt", "words", projector, optimizer, WORDS, loss, rate)


def train(work: Path, steps: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    x = features(work)
    language, tokenizer = load_smollm2()
    language.requires_grad_(False)
    torch.set_grad_enabled(True)
    table = language.get_input_embeddings().weight
    torch.manual_seed(0)
    projector = make_projector(x, table.shape[1])
    low = nn.ParameterList()
    for layer in language.model.layers:
        for name in ("q_proj", "v_proj"):
            updated = Updated(getattr(layer.self_attn, name))
            setattr(layer.self_attn, name, updated)
            low.extend([updated.down, updated.up])
    scenes = [cards.draw(0, "train", i) for i in range(len(x))]
    learn_words(work, projector, x, words_of(scenes, tokenizer, table))
    optimizer = torch.optim.AdamW(
        [{"params": [*projector.parameters()], "share": 0.25}, {"params": [*low]}],
        weight_decay=0.0,
    )
    prompt, end = tokenizer(PROMPT)["input_ids"], tokenizer.eos_token_id

    def loss(step: int) -> Tensor:
        each = len(x) // BATCH
        order = torch.randperm(len(x), generator=generator(0, "epoch", step // each))
        rows = order[step % each * BATCH :][:BATCH]
        ids = [tokenizer(scenes[i].caption)["input_ids"] + [end] for i in rows.tolist()]
        longest = max(map(len, ids))
        text = torch.tensor([prompt + one + [end] * (longest - len(one)) for one in ids])
        goal = torch.tensor([one + [-100] * (longest - len(one)) for one in ids])
        embeds = torch.cat([projector(x[rows].float()), F.embedding(text, table)], 1)
        hidden = language.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        logits = language.lm_head(hidden[:, -longest - 1 : -1])
        return F.cross_entropy(logits.flatten(0, 1), goal.flatten())

    def rate(step: int) -> float:
        return RATE * min(1, (step + 1) / 20, max(0.02, (steps - step) / (0.5 * steps)))

    model = nn.ModuleDict({"projector": projector, "low": low})
    fit(work / "state.pt", "captions", model, optimizer, steps, loss, rate)


def export(work: Path, folder: Path) -> None:
    """Writes what joins the two models, float16, as `mame-sd-eval caption --model` takes it."""
    state = torch.load(work / "state.pt", weights_only=True)
    layers = {"0": "linear_1", "2": "linear_2"}
    names = [f"layers.{n}.self_attn.{one}" for n in range(30) for one in ("q_proj", "v_proj")]
    tensors = {}
    for name, value in state["model"].items():
        part, number, *rest = name.split(".")
        if part == "projector":
            tensors[f"projector.{layers[number]}.{rest[0]}"] = value
        else:
            place, which = divmod(int(number), 2)
            tensors[f"{names[place]}.{('down', 'up')[which]}"] = value
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: value.half().contiguous() for name, value in tensors.items()}
    save_file(halves, folder / MINI, {"steps": str(state["step"]), "batch": str(BATCH)})


def write_pictures(folder: Path, count: int) -> None:
    """Pictures that none is trained on, and references.json beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in range(count):
        scene = cards.draw(0, "test", number)
        Image.fromarray(cards.render(scene)).save(folder / f"{number:04}.png")
        things = [[card.name, card.color] for card in scene.cards]
        images.append({"id": number, "file_name": f"{number:04}.png", "things": things})
        annotations += [{"image_id": number, "caption": text} for text in scene.references]
    content = {"images": images, "annotations": annotations}
    (folder / "references.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--work", type=Path, help="folder for features and the training state")
    add("--steps", type=int, default=2000, help="of four captions each")
    add("--export", type=Path, metavar="DIR", help="write the newest state; train nothing")
    add("--pictures", type=Path, metavar="DIR", help="write pictures to measure on")
    add("--num", type=int, default=200, help="how many pictures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.pictures:
        write_pictures(arguments.pictures, arguments.num)
    elif not arguments.work:
        parser.error("expected --work or --pictures, got neither")
    elif arguments.export:
        export(arguments.work, arguments.export)
    else:
        train(arguments.work, arguments.steps)


if __name__ == "__main__":
    main()
