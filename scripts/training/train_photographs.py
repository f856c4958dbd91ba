"""Train the evaluation's two instruments (`mame_sd.eval.instruments`) on photographs, by the clock.

    python -m scripts.training.train_photographs --prepare PICTURES --pack photographs.npz
    python -m scripts.training.train_photographs --pack photographs.npz --out DIR    # four minutes
    python -m scripts.training.train_photographs --pack photographs.npz --out DIR --tiny  # a test

One CPU core trains the instrument of clips in 75 minutes, with `--photographs 0 --video 4500
--windows 0.55 --batch 64 4`. Its clips are windows of a quarter of the tokens at first, which cost
a seventh. The shipped weights are of 2,110 steps; attention was computed by plain products in
bf16, which that CPU does about twice as fast as the fused kernel with gradients.

`scripts/training/photographs.py` says where the pictures come from. DIR gets weights in int8,
`photographs-1-of-2.safetensors` and so on, and results.json. With `--work` a stopped training
continues. The data of a step depends on (seed, instrument, step) alone, but the learning rate
follows the seconds, so that two runs differ.

Why this form: `loop.py` counts steps, for a CPU. Here the seconds of a card are fixed. Weights are
bf16 in the model and fp32 in the optimizer, so that normalisation and residuals move half of the
bytes that autocast would move: at a width of 384 a card is bound by them. A block is compiled once
and serves all. Muon trains the matrices of the blocks, as it does for the embedded models.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mame_sd.eval.instruments.models import CONDITIONS, KINDS, Instrument, Kind
from scripts.training.instruments import (
    begin_as_identity,
    save_conditions,
    save_weights,
    thumbnails_of,
)
from scripts.training.photographs import Pictures, prepare, read_pack

TIMES = (0.2, 0.5, 0.8)  # where the held-out loss is measured
HELD_OUT = 512  # samples of it
CONDITIONS_COUNT = 128
UNCONDITIONAL = 0.1  # share of the samples without their thumbnails
WARMUP = 40  # steps
DECAY = 0.99  # of the averaged weights
SAY_EVERY, SAVE_EVERY = 5.0, 60.0  # seconds
WINDOW = 16  # pixels a side, of 32: a quarter of the tokens, at a seventh of the cost
MUON, ADAM = 0.02, 0.002  # learning rates


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an instrument is trained.

    Attributes:
        seconds: of the training with its compilation; the held-out loss takes a few more.
        batch: samples of a step.
        windows: share of the seconds in which clips are windows of `WINDOW` pixels a side. A step
            has three times as many of them.
    """

    kind: Kind
    seconds: float
    batch: int
    seed: int
    compiled: bool
    device: torch.device
    windows: float = 0.0


def seeded(plan: Plan, part: str, step: int) -> torch.Generator:
    """Return a generator on the device that (seed, instrument, part, step) decide."""
    number = sum(ord(letter) << (5 * i) for i, letter in enumerate(plan.kind.name[:4] + part[:4]))
    return torch.Generator(plan.device).manual_seed(number * 1_000_003 + plan.seed * 7919 + step)


def draw(pictures: Pictures, kind: Kind, count: int, g: torch.Generator) -> torch.Tensor:
    """Return clean samples in -1..1 [count, *kind.shape], each the more textured one of two."""
    if len(kind.shape) == 3:
        pairs = pictures.crops(2 * count, kind.shape[-1], g)
    else:
        pairs = pictures.clips(2 * count, kind.shape[1], kind.shape[-1], g)
    texture = pairs.diff(dim=-1).abs().flatten(1).mean(1).view(2, count)
    first, second = pairs.chunk(2)
    chosen = (texture[0] >= texture[1]).view(-1, *[1] * (first.ndim - 1))
    return torch.where(chosen, first, second)


def logit_normal(count: int, g: torch.Generator) -> torch.Tensor:
    """Return times in (0, 1) [count], stratified over the batch (arXiv 2403.03206, section 3.1)."""
    shift = torch.rand(1, generator=g, device=g.device)
    u = (shift + torch.arange(count, device=g.device) / count) % 1
    return torch.special.ndtri(u.clamp(1e-4, 1 - 1e-4)).sigmoid()


def flow_loss(
    instrument: Instrument,
    clean: torch.Tensor,
    dtype: torch.dtype,
    g: torch.Generator,
    window: int | None = None,
) -> torch.Tensor:
    """Return the mean squared error of the velocity at logit-normal times.

    Args:
        instrument: The model.
        clean: Samples [B, *kind.shape].
        dtype: Of the model.
        g: Draws noise and times.
        window: Pixels a side of the part that the model sees of clips. If None, all.
    """
    count, thumbnails, corner = len(clean), thumbnails_of(clean), (0, 0)
    if window is not None:
        most = (clean.shape[-1] - window) // 2 + 1  # by patches of two pixels
        row, column = (2 * torch.randint(most, (2,), generator=g, device=g.device)).tolist()
        clean, corner = clean[..., row : row + window, column : column + window], (row, column)
    noise = torch.randn(clean.shape, generator=g, device=g.device)
    t = logit_normal(count, g)
    known = (torch.rand(count, generator=g, device=g.device) >= UNCONDITIONAL).float()
    share = t.view(-1, *[1] * (clean.ndim - 1))
    noisy = torch.lerp(clean, noise, share).to(dtype)
    predicted = instrument(noisy, t, thumbnails, known, corner)
    return F.mse_loss(predicted.float(), noise - clean)


@torch.no_grad()
def held_out_losses(instrument: Instrument, pictures: Pictures, plan: Plan) -> dict[str, float]:
    """Return the mean squared error of the velocity at `TIMES`, on crops of held-out pictures."""
    count = min(HELD_OUT, 16 * plan.batch)
    clean = draw(pictures, plan.kind, count, seeded(plan, "test", 0))
    noise = torch.randn(clean.shape, generator=seeded(plan, "noise", 0), device=plan.device)
    losses = {}
    for t in TIMES:
        total = 0.0
        for x, e in zip(clean.split(plan.batch), noise.split(plan.batch), strict=True):
            ones = x.new_ones(len(x))
            predicted = instrument(torch.lerp(x, e, t), t * ones, thumbnails_of(x), ones)
            total += F.mse_loss(predicted, e - x).item() * len(x) / count
        losses[str(t)] = total
    return losses


class Trainer:
    """What a checkpoint holds: weights in fp32 and averaged, optimizers, progress."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        on_card = plan.device.type == "cuda"
        fast = on_card or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.dtype = torch.bfloat16 if fast else torch.float32
        self.instrument = Instrument(plan.kind)
        begin_as_identity(self.instrument)
        self.instrument.to(plan.device)
        names, self.weights = zip(*self.instrument.model.named_parameters(), strict=True)
        self.names = list(names)
        self.masters = [p.detach().clone() for p in self.weights]
        self.average = [p.clone() for p in self.masters]
        for weight in self.weights:
            weight.data = weight.data.to(self.dtype)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        inside = [_is_matrix(n, p) for n, p in zip(names, self.masters, strict=True)]
        matrices = [p for p, yes in zip(self.masters, inside, strict=True) if yes]
        rest = [p for p, yes in zip(self.masters, inside, strict=True) if not yes]
        self.optimizers: list[tuple[float, torch.optim.Optimizer]] = [
            (MUON, torch.optim.Muon(matrices, lr=MUON, weight_decay=0.01)),
            (
                ADAM,
                torch.optim.AdamW(
                    rest, lr=ADAM, betas=(0.9, 0.98), weight_decay=0.0, fused=on_card
                ),
            ),
        ]
        self.step, self.elapsed = 0, 0.0

    def state(self) -> dict[str, Any]:
        optimizers = [optimizer.state_dict() for _, optimizer in self.optimizers]
        tensors = {"masters": self.masters, "average": self.average, "optimizers": optimizers}
        return {**tensors, "step": self.step, "elapsed": self.elapsed}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        torch._foreach_copy_(self.masters, state["masters"])
        torch._foreach_copy_(self.average, state["average"])
        torch._foreach_copy_(list(self.weights), self.masters)
        for (_, optimizer), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed = state["step"], state["elapsed"]

    def loss(self, pictures: Pictures) -> torch.Tensor:
        """Return the loss of the next step, its gradients in the model."""
        g = seeded(self.plan, "step", self.step)
        windows = self.elapsed < self.plan.windows * self.plan.seconds
        count = 3 * self.plan.batch if windows else self.plan.batch
        clean = draw(pictures, self.plan.kind, count, g)
        loss = flow_loss(self.instrument, clean, self.dtype, g, WINDOW if windows else None)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def advance(self, progress: float) -> None:
        """Take a step by the gradients in the model.

        Args:
            progress: share of the seconds that has passed, of which the learning rate is a cosine.
        """
        gradients = [master.grad for master in self.masters]
        torch._foreach_copy_(gradients, [weight.grad for weight in self.weights])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        half = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        rate = min(1.0, (self.step + 1) / WARMUP) * (0.01 + 0.99 * half)
        for base, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * rate
            optimizer.step()
        torch._foreach_copy_(list(self.weights), self.masters)
        for weight in self.weights:
            weight.grad = None
        self.step += 1
        decay = min(DECAY, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.average, self.masters, 1 - decay)

    def averaged(self) -> Instrument:
        """Return an instrument of its own with the averaged weights, in fp32."""
        copy = Instrument(self.plan.kind).to(self.plan.device)
        average = dict(zip(self.names, self.average, strict=True))
        copy.model.load_state_dict({**copy.model.state_dict(), **average})
        return copy.eval().requires_grad_(False)

    def compile(self, pictures: Pictures) -> bool:
        """Compile the blocks; return False, with the blocks as they were, where that fails."""
        model = self.instrument.model
        blocks = model.blocks if hasattr(model, "blocks") else model.transformer_blocks
        try:
            for block in blocks:
                block.compile(dynamic=False)
            self.loss(pictures)
        except Exception as error:  # no compiler on the machine, or a fault of it
            print(f"not compiled: {str(error).splitlines()[0][:300]}", flush=True)
            torch._dynamo.reset()
            for block in blocks:
                block._compiled_call_impl = None
        for weight in self.weights:
            weight.grad = None
        return blocks[0]._compiled_call_impl is not None


def _is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Muon's: the matrices of the blocks, less those that make modulation of the time."""
    return parameter.ndim == 2 and "blocks." in name and ".norm" not in name


def synchronized(device: torch.device) -> float:
    """Return the time when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def train(
    plan: Plan, train_pictures: Pictures, held_out: Pictures, out: Path, work: Path | None
) -> dict[str, Any]:
    """Train an instrument, write its weights into `out`, and return what results.json says."""
    name, begin = plan.kind.name, time.monotonic()
    trainer = Trainer(plan)
    checkpoint = work / f"{name}.pt" if work else None
    if checkpoint and checkpoint.exists():
        trainer.restore(torch.load(checkpoint, map_location=plan.device, weights_only=True))
    compiled = plan.compiled and trainer.compile(train_pictures)
    first = synchronized(plan.device)
    print(f"{name}: {first - begin:.1f} s to start, compiled: {compiled}", flush=True)
    try:
        seconds = plan.seconds - (first - begin)
        history = _loop(replace(plan, seconds=seconds), trainer, train_pictures, checkpoint)
    finally:
        if checkpoint:
            _save(trainer, checkpoint)
    averaged = trainer.averaged()
    files = save_weights(name, averaged.model.state_dict(), out)
    losses = held_out_losses(averaged, held_out, plan)
    on_card = plan.device.type == "cuda"
    return {
        "held_out_loss": losses,
        "steps": trainer.step,
        "batch": plan.batch,
        "seconds": round(trainer.elapsed, 1),
        "start_seconds": round(first - begin, 1),
        "compiled": compiled,
        "seed": plan.seed,
        "device": torch.cuda.get_device_name() if on_card else "cpu",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in averaged.parameters()),
        "files": [file.name for file in files],
        "loss": history,
    }


def _loop(
    plan: Plan, trainer: Trainer, pictures: Pictures, checkpoint: Path | None
) -> list[tuple[int, float]]:
    """Take steps until the seconds have passed; return (step, mean loss) of every few seconds."""
    before, last = trainer.elapsed, time.monotonic()
    begin = said = saved = last
    history, total, since = [], torch.zeros((), device=plan.device), trainer.step
    while trainer.elapsed < plan.seconds:
        total += trainer.loss(pictures)
        trainer.advance(trainer.elapsed / plan.seconds)
        now = time.monotonic()
        trainer.elapsed = before + now - begin
        if now - said > SAY_EVERY or trainer.elapsed >= plan.seconds:
            steps = trainer.step - since
            history.append((trainer.step, round(total.item() / steps, 5)))
            now = synchronized(plan.device)
            print(
                f"{plan.kind.name} {trainer.elapsed:6.1f} s, step {trainer.step}, "
                f"loss {history[-1][1]:.4f}, {(now - said) / steps:.3g} seconds a step",
                flush=True,
            )
            said, since = now, trainer.step
            total.zero_()
        if checkpoint and now - saved > SAVE_EVERY:
            _save(trainer, checkpoint)
            saved = time.monotonic()
    return history


def _save(trainer: Trainer, checkpoint: Path) -> None:
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    part = checkpoint.with_suffix(".part")
    torch.save(trainer.state(), part)
    part.replace(checkpoint)


def write_conditions(pack: Path, file: Path) -> None:
    """Write the thumbnails of `CONDITIONS_COUNT` crops and clips of held-out pictures."""
    pictures = Pictures(read_pack(pack)[1], torch.device("cpu"))
    found = {
        name: thumbnails_of(
            draw(pictures, kind, CONDITIONS_COUNT, torch.Generator().manual_seed(0))
        )
        for name, kind in KINDS.items()
    }
    save_conditions(file, found)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--pack", type=Path, required=True, help="the file of photographs")
    add("--prepare", type=Path, metavar="PICTURES", help="write the pack, of unpacked packages")
    add("--conditions", type=Path, default=CONDITIONS, help="where --prepare writes thumbnails")
    add("--out", type=Path, help="folder of the weights")
    add("--work", type=Path, help="folder of checkpoints; a stopped training continues")
    add("--photographs", type=float, default=112, metavar="SECONDS", help="0 trains none")
    add("--video", type=float, default=78, metavar="SECONDS", help="0 trains none")
    add("--windows", type=float, default=0.0, help="share of video's seconds that sees windows")
    add("--batch", type=int, nargs=2, default=(128, 64), help="samples of a step, of each")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch's name")
    add("--seed", type=int, default=0, help="of weights, crops and noise")
    add("--eager", action="store_true", help="compile nothing")
    add("--tiny", action="store_true", help="one head, two blocks, four samples: a rehearsal")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = options()
    args = parser.parse_args(arguments)
    if args.prepare:
        prepare(args.prepare, args.pack)
        write_conditions(args.pack, args.conditions)
        return
    if args.out is None:
        parser.error("expected --out or --prepare, got neither")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    train_pictures, held_out = (Pictures(p, device) for p in read_pack(args.pack))
    print(f"{len(train_pictures.table)} pictures, {len(held_out.table)} held out", flush=True)
    results = {}
    for name, batch in zip(KINDS, args.batch, strict=True):
        seconds = getattr(args, name)
        if not seconds:
            continue
        kind, compiled = KINDS[name], device.type == "cuda" and not args.eager
        if args.tiny:
            kind, batch = replace(kind, heads=1, blocks=2), 4
        plan = Plan(
            kind=kind,
            seconds=seconds,
            batch=batch,
            seed=args.seed,
            compiled=compiled,
            device=device,
            windows=args.windows if name == "video" else 0.0,
        )
        results[name] = train(plan, train_pictures, held_out, args.out, args.work)
        (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results[name]["held_out_loss"]), flush=True)


if __name__ == "__main__":
    main()
