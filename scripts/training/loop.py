"""A training loop whose every step depends on (seed, stage, step) only.

So a stopped run continues where it was.
"""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pytorch_optimizer import Muon
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mame_sd.runs.files import written_whole

SAVE_EVERY = 90.0  # seconds
FEW = 5  # a smoke run takes fewer steps


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a training. Its checkpoint is WORK/NAME.pt.

    The learning rate rises over `warmup` steps and stays. Over the last `decay` of the steps it
    falls to `least` of itself, so that a stage can be extended while it is constant.
    """

    name: str
    steps: int
    batch: int
    lr: float  # of Muon; AdamW's is a tenth
    warmup: int = 100
    decay: float = 0.2
    least: float = 0.01
    ema: float | None = 0.998  # of the weights that are kept; None keeps those of the last step

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        left = (self.steps - step) / max(1, self.decay * self.steps)
        return self.lr * min(1.0, (step + 1) / self.warmup) * max(self.least, min(1.0, left))


@dataclass(frozen=True, kw_only=True)
class CosineStage(Stage):
    """A stage whose learning rate falls by half a cosine to `lr_end`."""

    lr_end: float

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        half = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
        return min(1.0, (step + 1) / self.warmup) * (self.lr_end + (self.lr - self.lr_end) * half)


def mixed_precision() -> torch.autocast:
    """Return autocast to bf16 if the processor multiplies it.

    Emulated bf16 takes 50 times as long as fp32.
    """
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast("cpu", torch.bfloat16, enabled=fast)


def atomic_save(state: dict, path: Path) -> None:
    """Save a checkpoint, so that a stopped run leaves either the old or the new one."""
    with written_whole(path) as file:
        torch.save(state, file)


def generator(seed: int, stage: str, step: int) -> torch.Generator:
    """Return the random generator of a step."""
    digest = hashlib.sha256(f"{seed}/{stage}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def muon(model: torch.nn.Module, inside: Callable[[str], bool], decay: float = 0.0) -> Muon:
    """Return Muon for the weight matrices of layers, and AdamW for the rest.

    `inside` names the layers. The rest (embeddings, patches, modulation) learns at a tenth of the
    rate.
    """
    hidden, rest = [], []
    for name, p in model.named_parameters():
        (hidden if p.ndim >= 2 and inside(name) else rest).append(p)
    common = {"use_adjusted_lr": False, "ns_steps": 4, "weight_decay": decay}
    adam = {"use_muon": False, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.0}
    return Muon([{"params": hidden, "use_muon": True, **common}, {"params": rest, **adam}])


def checkpoint(work: Path, stage: Stage) -> dict:
    """Return the path of a stage's checkpoint."""
    state: dict = torch.load(work / f"{stage.name}.pt", weights_only=True)
    return state


def fit(
    work: Path,
    stage: Stage,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int], torch.Tensor],
) -> None:
    """Train to the end of the stage, continuing from its checkpoint in `work`.

    Args:
        work: Folder of the training.
        stage: The stage.
        model: What is trained.
        optimizer: Its optimizer.
        loss_of: Returns the loss of a step.
    """
    path, name, steps, ema = work / f"{stage.name}.pt", stage.name, stage.steps, stage.ema
    if steps < FEW:
        for group in optimizer.param_groups:
            group["ns_steps"] = 0  # Muon's iterations are most of a step; a few learn nothing
    done, average = 0, {k: v.clone() for k, v in model.state_dict().items()}
    if path.exists():
        state = checkpoint(work, stage)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, average = state["step"], state["ema"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        atomic_save({**state, "step": done, "ema": average}, path)

    text, bar = TextColumn("{task.description}"), BarColumn()
    columns = (text, bar, MofNCompleteColumn(), TimeRemainingColumn())
    saved, losses = time.monotonic(), []
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=steps, completed=done)
        while done < steps:
            for group in optimizer.param_groups:  # beside Muon, AdamW takes a tenth of its rate
                share = group.get("share", 1.0 if group.get("use_muon", True) else 0.1)
                group["lr"] = stage.rate(done) * share
            loss = loss_of(done)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            decay = min(ema, (1 + done) / (10 + done)) if ema else 0.0
            with torch.no_grad():
                for key, value in model.state_dict().items():
                    kept = decay if value.is_floating_point() else 0.0
                    average[key].copy_(torch.lerp(value, average[key], kept) if kept else value)
            losses.append(loss.item())
            said = f"{name} loss {np.mean(losses[-50:]):.4f}"
            progress.update(task, completed=done, description=said)
            if done % 50 == 0:
                progress.console.print(f"{time.strftime('%H:%M:%S')} {done}/{steps} {said}")
            if time.monotonic() - saved > SAVE_EVERY or steps < 10 or done == steps:
                save()
                saved = time.monotonic()
