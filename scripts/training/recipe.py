"""Common code of the trainings: a recipe says what a model learns, and `run` is its command.

A training runs through its stages, each of which begins with what the previous one learned. It may
be stopped at any time: the same command continues it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mame_sd.runs.files import written_whole
from scripts.training.loop import Stage, checkpoint, fit

S = TypeVar("S", bound=Stage)


class Recipe(ABC, Generic[S]):
    """The training of one model.

    Args:
        args: The command's options.
        stages: The stages in order.
        small: What a smoke run changes in each stage, besides running one step of two samples.
    """

    @staticmethod
    def options(add: Callable[..., Any]) -> None:
        """Add the options of this training only, by `add_argument`."""

    def __init__(self, args: argparse.Namespace, stages: Sequence[S], **small: Any) -> None:
        self.work: Path = args.work
        self.seed: int = args.seed
        self.smoke: bool = args.smoke
        self.stages = stages
        if self.smoke:
            small = {"steps": 1, "batch": 2, **small}
            self.stages = [replace(stage, **small) for stage in stages]

    @abstractmethod
    def new_model(self, stage: S) -> torch.nn.Module:
        """Return the model of a stage with random weights."""

    def begin(self, stage: S, model: Any) -> None:
        """Give the model what was learned in the previous stage."""

    @abstractmethod
    def optimizer(self, stage: S, model: Any) -> torch.optim.Optimizer:
        """Return the optimizer of the model."""

    @abstractmethod
    def loss(self, stage: S, model: Any, step: int) -> torch.Tensor:
        """Return the loss of a step, which follows from (seed, stage, step)."""

    @abstractmethod
    def export(self, folder: Path, stage: S, origin: dict[str, str]) -> None:
        """Write what a stage learned, for others to load."""

    def pictures(self, each: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Yield the pictures that the model is measured on, `each` of every class.

        Yields a file's name and a function that draws it as [side, side, 3].
        """
        raise NotImplementedError

    def before(self, stage: S) -> S | None:
        """Return the stage with whose weights this one begins."""
        number = self.stages.index(stage)
        return self.stages[number - 1] if number else None

    def learned(self, stage: S) -> Any:
        """Return the model as a stage left it, its weights averaged over steps."""
        model = self.new_model(stage)
        model.load_state_dict(checkpoint(self.work, stage)["ema"])
        return model.eval()

    def train(self, stage: S) -> None:
        """Train one stage to its end, or do nothing if that is done."""
        path = self.work / f"{stage.name}.pt"
        if path.exists() and checkpoint(self.work, stage)["step"] >= stage.steps:
            return
        torch.manual_seed(self.seed)
        model = self.new_model(stage).train()
        self.begin(stage, model)
        optimizer = self.optimizer(stage, model)
        fit(self.work, stage, model, optimizer, lambda step: self.loss(stage, model, step))
        print(f"{stage.name}: {stage.steps} steps done", flush=True)

    def draw(self, folder: Path, each: int) -> None:
        """Write the pictures that the model is measured on; existing ones stay."""
        for name, picture in self.pictures(each):
            if not (folder / name).exists():
                with written_whole(folder / name) as file:
                    Image.fromarray(picture()).save(file, "PNG")


def run(kind: type[Recipe[Any]], about: str | None, argv: Sequence[str] | None = None) -> None:
    """Run the command of a training.

    Args:
        kind: The recipe.
        about: The script's docstring.
        argv: The arguments. If None, the process's own.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, help="folder for the training state")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="1 beside other work, 2 on two idle cores")
    add("--until", metavar="STAGE", help="the last stage to train; without it, all")
    add("--export", type=Path, metavar="DIR", help="write the newest checkpoint; train nothing")
    add("--draw", type=Path, metavar="DIR", help="write what it is measured on; train nothing")
    add("--each", type=int, default=10, help="how many of each class --draw writes")
    add("--smoke", action="store_true", help="a few steps of everything")
    kind.options(add)
    args = parser.parse_args(argv)
    if args.work is None and args.draw is None:
        parser.error("expected --work or --draw, got neither")
    if args.draw is not None and kind.pictures is Recipe.pictures:
        parser.error("--draw: this model is not measured on pictures of its own; leave it out")
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
    recipe = kind(args)
    if args.draw is not None:
        recipe.draw(args.draw, args.each)
        print(f"wrote {args.draw}")
        return
    names = [stage.name for stage in recipe.stages]
    if args.until not in (None, *names):
        parser.error(f"--until: expected one of {', '.join(names)}, got {args.until}")
    last = names.index(args.until or names[-1])
    for stage in [] if args.export else recipe.stages[: last + 1]:
        recipe.train(stage)
    begun = [stage for stage in recipe.stages if (args.work / f"{stage.name}.pt").exists()]
    if not begun:
        parser.error(f"--work {args.work}: expected a checkpoint, found none; train first")
    steps = {stage.name: checkpoint(args.work, stage)["step"] for stage in begun}
    out = args.export or (args.work / "model" if args.smoke else None)
    if out:
        recipe.export(out, begun[-1], origin_of(args.seed, steps))
        print(f"wrote {out}")


def refit(
    layer: torch.nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    prior: torch.Tensor | None = None,
    ridge: float | None = None,
) -> None:
    """Give a layer the weights that map `inputs` to `targets` by least squares.

    Args:
        layer: A linear layer, or a convolution over whole patches.
        inputs: [n, inputs].
        targets: [n, outputs].
        prior: Weights and bias [outputs, inputs + 1] to stay near where the data matter little. If
            None, zeros.
        ridge: How near. If None, a thousandth of the mean square of the inputs.
    """
    x = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
    gram, wanted = x.T @ x, x.T @ targets.double()
    ridge = 1e-3 * float(gram.diagonal().mean()) if ridge is None else ridge
    if prior is not None:
        wanted += ridge * prior.T.double()
    solution = torch.linalg.solve(gram + ridge * torch.eye(x.shape[1]), wanted).T.float()
    layer.weight.copy_(solution[:, :-1].reshape(layer.weight.shape))
    layer.bias.copy_(solution[:, -1])


def origin_of(seed: int, steps: dict[str, int]) -> dict[str, str]:
    """Return metadata of exported weights: the training code, the seed and the steps."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {
        "script_sha256": code.hexdigest(),
        "seed": str(seed),
        "steps": json.dumps(steps),
        "subjects": "Noto Emoji, Apache-2.0",
    }


def finish_export(out: Path, origin: dict[str, str]) -> None:
    """Finish a folder that was saved in half precision.

    Libraries load it in float32, and the weights' files say where they come from.
    """
    for config in out.rglob("config.json"):  # transformers loads in the dtype that stands here
        text = config.read_text(encoding="utf-8")
        text = text.replace('"dtype": "float16"', '"dtype": "float32"')
        # diffusers writes down the folder of this machine that a part was loaded from
        text = re.sub(r'\n *"_name_or_path": "[^"]*",', "", text)
        config.write_text(text, encoding="utf-8")
    for path in out.rglob("*.safetensors"):
        tensors = {k: v.contiguous() for k, v in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt", **origin})
