"""A training loop whose every step depends on (seed, stage, step) alone, so that a stopped run
continues where it was.
"""

import hashlib
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from pytorch_optimizer import Muon
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file

from mame_sd.runs.files import written_whole

SAVE_EVERY = 90.0  # seconds
FEW = 5  # steps of a smoke run are fewer


def mixed_precision() -> torch.autocast:
    """bf16 where the processor multiplies it; emulated it takes 50 times as long as fp32."""
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast("cpu", torch.bfloat16, enabled=fast)


def atomic_save(state: dict, path: Path) -> None:
    with written_whole(path) as file:
        torch.save(state, file)


def generator(seed: int, stage: str, step: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{stage}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def cosine(step: int, steps: int, start: float, end: float, warmup: int) -> float:
    """Learning rate: linear warm-up, then half a cosine from ``start`` to ``end``."""
    ramp = min(1.0, (step + 1) / max(1, warmup))
    return ramp * (end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def muon(model: torch.nn.Module, inside: Callable[[str], bool], decay: float = 0.0) -> Muon:
    """Muon for the weight matrices whose names are `inside` of layers, AdamW at a tenth of its
    learning rate for what meets the outside: embeddings, patches, modulation.
    """
    hidden, rest = [], []
    for name, p in model.named_parameters():
        (hidden if p.ndim >= 2 and inside(name) else rest).append(p)
    common = {"use_adjusted_lr": False, "ns_steps": 4, "weight_decay": decay}
    adam = {"use_muon": False, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.0}
    return Muon([{"params": hidden, "use_muon": True, **common}, {"params": rest, **adam}])


def save_exported(out: Path, metadata: dict[str, str]) -> None:
    """Finish a folder that was saved in half precision: libraries load it in float32, and the
    weights' files say where they come from.
    """
    for config in out.rglob("config.json"):  # transformers loads in the dtype that stands here
        text = config.read_text(encoding="utf-8")
        text = text.replace('"dtype": "float16"', '"dtype": "float32"')
        # diffusers writes down the folder of this machine that a part was loaded from
        text = re.sub(r'\n *"_name_or_path": "[^"]*",', "", text)
        config.write_text(text, encoding="utf-8")
    for path in out.rglob("*.safetensors"):
        tensors = {k: v.contiguous() for k, v in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt", **metadata})


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group of parameters its share of `lr`: what it says, else a tenth beside Muon."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("share", 1.0 if group.get("use_muon", True) else 0.1)


class Named(Protocol):
    """A stage of a training: its checkpoint is WORK/NAME.pt."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> int: ...


S = TypeVar("S", bound=Named)


def checkpoint(work: Path, stage: Named) -> dict:
    state: dict = torch.load(work / f"{stage.name}.pt", weights_only=True)
    return state


def train_stages(
    work: Path, stages: list[S], until: str, train: Callable[[S, S | None], None]
) -> list[S]:
    """``train(stage, the one before)`` for each stage up to ``until`` that is not done; those
    stages.
    """
    wanted = stages[: [stage.name for stage in stages].index(until) + 1]
    for previous, stage in zip([None, *stages], wanted, strict=False):
        if (work / f"{stage.name}.pt").exists() and checkpoint(work, stage)["step"] >= stage.steps:
            continue
        train(stage, previous)
        print(f"{stage.name}: {stage.steps} steps done", flush=True)
    return wanted


def fit(
    path: Path,
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    loss_fn: Callable[[int], torch.Tensor],
    lr_fn: Callable[[int], float],
    ema: float | None = None,
) -> None:
    """Train to ``steps``, continuing from ``path``, where the state is kept."""
    if steps < FEW:
        for group in optimizer.param_groups:
            group["ns_steps"] = 0  # Muon's iterations are most of a step; a few learn nothing
    done, average = 0, {k: v.clone() for k, v in model.state_dict().items()}
    if path.exists():
        state = torch.load(path, weights_only=True)
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
            set_lr(optimizer, lr_fn(done))
            loss = loss_fn(done)
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
