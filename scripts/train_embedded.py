"""Train the embedded model from nothing: autoencoder, tokenizer, text encoder and UNet, on a CPU or a GPU.

    python scripts/render_glyphs.py                        # once: the subjects
    python scripts/train_embedded.py --work out/train      # hours on two cores; stop and start it at will
    python scripts/train_embedded.py --smoke --work DIR    # the whole path in under a minute, into DIR/model

Every batch depends on (seed, stage, step) alone and the state is written with the step, so a killed and resumed run gives
the weights of an undisturbed one, up to rounding. The recipe: the UNet's inner levels are trained first, on 16 x 16 patches of 4 x 4
latents; then an outer level is put around them (32 x 32 patches of 2 x 2), then another (the plain 64 x 64 latents). What
the inner levels know, which shape goes where, stays valid at each growth since every cell keeps its place in the picture.
"""

import argparse
import hashlib
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny, DPMSolverMultistepScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from pytorch_optimizer import Muon
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from mame_sd import embedded_model as subjects

LATENTS = 64  # side of the latent grid at the default size
TEXT_WIDTH = 192


@dataclass(frozen=True)
class Stage:
    """One stage: ``patch`` latents a side go into one position of the UNet's first level."""

    name: str
    patch: int
    channels: tuple[int, ...]
    heads: tuple[int, ...]
    steps: int
    batch: int
    lr: float  # of Muon; AdamW's is a tenth
    lr_end: float
    warmup: int = 50


STAGES = (
    Stage("patch4", 4, (192, 256), (3, 4), 1106, 24, 0.01, 0.004),
    Stage("patch2", 2, (96, 192, 256), (2, 3, 4), 1150, 8, 0.008, 0.003),
    Stage("patch1", 1, (32, 96, 192, 256), (1, 2, 3, 4), 900, 4, 0.008, 0.0),
)
AUTOENCODER_STEPS = 2400
EMA_DECAY = 0.995
SAVE_EVERY = 90.0  # seconds


def atomic_save(state: dict, path: Path) -> None:
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def generator(seed: int, stage: str, step: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{stage}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def cosine(step: int, steps: int, start: float, end: float, warmup: int) -> float:
    """Learning rate: linear warm-up, then half a cosine from ``start`` to ``end``."""
    ramp = min(1.0, (step + 1) / max(1, warmup))
    return ramp * (end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


# --- autoencoder ---------------------------------------------------------------------------------------------------


def new_autoencoder() -> AutoencoderTiny:
    return AutoencoderTiny(
        encoder_block_out_channels=(48, 48, 48), decoder_block_out_channels=(48, 48, 48),
        num_encoder_blocks=(1, 2, 2), num_decoder_blocks=(2, 2, 1),
    )  # fmt: skip


def crops(rgba: torch.Tensor, colors: torch.Tensor, size: int, batch: int, g: torch.Generator) -> torch.Tensor:
    """Random crops of random glyphs [n, 4, 256, 256] on random colours: [batch, 3, size, size] in [-1, 1]."""
    glyph = torch.randint(len(rgba), (batch,), generator=g).tolist()
    color = colors[torch.randint(len(colors), (batch,), generator=g)]
    noise = torch.rand(batch, 3, generator=g)
    color = torch.where(torch.rand(batch, 1, generator=g) < 0.5, color, noise)[:, :, None, None]
    corner = torch.randint(rgba.shape[-1] - size + 1, (batch, 2), generator=g).tolist()
    cut = (
        torch.stack([rgba[i, :, y : y + size, x : x + size] for i, (y, x) in zip(glyph, corner, strict=True)]).float()
        / 255
    )
    return (cut[:, :3] * cut[:, 3:] + color * (1 - cut[:, 3:])) * 2 - 1


def autoencoder_loss(vae: AutoencoderTiny, images: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """L1 + gradient loss of the reconstruction from slightly noisy latents, plus a leash on the latents' size."""
    latents = vae.encode(images).latents
    noise = 0.05 * torch.randn(latents.shape, generator=g)
    output = vae.decode(latents + noise.to(latents)).sample.float()
    edges = sum(F.l1_loss(output.diff(dim=d), images.diff(dim=d)) for d in (2, 3))
    center = latents.float().mean((0, 2, 3)).square().mean()
    return F.l1_loss(output, images) + edges + 0.02 * (F.relu(latents.float().abs() - 2).square().mean() + center)


def train_autoencoder(work: Path, rgba: torch.Tensor, seed: int, steps: int) -> AutoencoderTiny:
    torch.manual_seed(seed)
    vae = new_autoencoder().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    colors = torch.tensor(list(subjects.BACKGROUNDS.values())) / 255

    def loss(step: int) -> torch.Tensor:
        g = generator(seed, "autoencoder", step)
        images = crops(rgba, colors, 64, 16, g).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            return autoencoder_loss(vae, images, g)

    path = work / "autoencoder.pt"
    fit(path, "autoencoder", vae, optimizer, steps, loss, lambda s: cosine(s, steps, 2e-3, 1e-5, 100))
    return vae


def pictures(rgba: torch.Tensor, background: str) -> torch.Tensor:
    color = torch.tensor(subjects.BACKGROUNDS[background], dtype=torch.float32)[:, None, None] / 255
    cut = rgba.float() / 255
    return (cut[:, :3] * cut[:, 3:] + color * (1 - cut[:, 3:])) * 2 - 1


@torch.no_grad()
def all_latents(work: Path, vae: AutoencoderTiny, rgba: torch.Tensor) -> torch.Tensor:
    """Latents of every glyph on every background, [glyphs, backgrounds, 4, h, w], scaled to mean square 1."""
    path = work / "latents.pt"
    if not path.exists():
        rows = []
        for background in subjects.BACKGROUNDS:
            images = pictures(rgba, background).to(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16):
                rows.append(torch.cat([vae.encode(chunk).latents.float() for chunk in images.split(16)]))
        latents = torch.stack(rows, 1)
        scale = 1 / latents.square().mean().sqrt().item()
        print(f"latents: scale {scale:.3f}, channel means {[round(v, 2) for v in latents.mean((0, 1, 3, 4)).tolist()]}")
        atomic_save({"latents": latents * scale, "scale": scale}, path)
    return torch.load(path, weights_only=True)["latents"]


# --- text ----------------------------------------------------------------------------------------------------------


def new_tokenizer(captions: list[str]) -> CLIPTokenizer:
    """A byte-level BPE in which every word of the captions is one token, and any other string is still spelt out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = sorted({word for text in captions for word in text.lower().replace("-", " - ").split()})
    bpe.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=20000, min_frequency=1, end_of_word_suffix="</w>", show_progress=False)
    )
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    symbols = alphabet + [a + "</w>" for a in alphabet] + ["".join(pair) for pair in merges]
    vocab = {symbol: i for i, symbol in enumerate(dict.fromkeys([*symbols, "<|startoftext|>", "<|endoftext|>"]))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=TEXT_WIDTH, intermediate_size=4 * TEXT_WIDTH, num_hidden_layers=3,
        num_attention_heads=3, max_position_embeddings=77, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, projection_dim=TEXT_WIDTH,
    ))  # fmt: skip


# --- diffusion -----------------------------------------------------------------------------------------------------


def new_scheduler() -> DPMSolverMultistepScheduler:
    """Almost no signal at the last step (sqrt of alpha-bar: 0.003), so that plain backgrounds come out in any colour."""
    return DPMSolverMultistepScheduler(
        beta_start=0.00085, beta_end=0.03, beta_schedule="scaled_linear", prediction_type="v_prediction",
        timestep_spacing="trailing", final_sigmas_type="zero",
    )  # fmt: skip


def new_unet(stage: Stage) -> UNet2DConditionModel:
    inner = len(stage.channels) - 1
    return UNet2DConditionModel(
        sample_size=LATENTS // stage.patch, in_channels=4 * stage.patch**2, out_channels=4 * stage.patch**2,
        block_out_channels=stage.channels, layers_per_block=1, attention_head_dim=stage.heads, norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D",) * inner + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * inner,
        cross_attention_dim=TEXT_WIDTH, time_embedding_dim=256,
    )  # fmt: skip


@torch.no_grad()
def grow(small: UNet2DConditionModel, large: UNet2DConditionModel) -> None:
    """Put the levels of ``small`` inside ``large``, which has one level more around them."""
    own, new = small.state_dict(), large.state_dict()
    shift = len(large.down_blocks) - len(small.down_blocks)
    for name, value in own.items():
        parts = name.split(".")
        if parts[0] == "down_blocks":
            parts[1] = str(int(parts[1]) + shift)
        target = new.get(".".join(parts))
        if target is None or parts[0] in ("conv_in", "conv_out", "conv_norm_out"):
            continue
        if target.shape == value.shape:
            target.copy_(value)
        elif parts[0] == "up_blocks" and value.ndim == 4 and target.shape[0] == value.shape[0]:
            target[:, : small.config.block_out_channels[0]].copy_(value[:, : small.config.block_out_channels[0]])
    t = torch.arange(
        1000
    )  # the sinusoids have another width: give nearly the same embedding of t; a ridge keeps the weights small
    wanted = small.time_embedding.linear_1(small.time_proj(t)).double()
    basis = torch.cat([large.time_proj(t).double(), torch.ones(1000, 1, dtype=torch.float64)], 1)
    ridge = 10 * torch.eye(basis.shape[1], dtype=torch.float64)
    solution = torch.linalg.solve(basis.T @ basis + ridge, basis.T @ wanted).float()
    new["time_embedding.linear_1.weight"].copy_(solution[:-1].T)
    new["time_embedding.linear_1.bias"].copy_(solution[-1])


class Denoiser(torch.nn.Module):
    def __init__(self, unet: UNet2DConditionModel, text_encoder: CLIPTextModel) -> None:
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder


def training_pairs(glyph_count: int) -> torch.Tensor:
    names, backgrounds = subjects.glyph_names()[:glyph_count], list(subjects.BACKGROUNDS)
    pairs = [(i, j) for i, n in enumerate(names) for j, b in enumerate(backgrounds) if not subjects.is_held_out(n, b)]
    return torch.tensor(pairs)


def sample_timesteps(batch: int, g: torch.Generator) -> torch.Tensor:
    """Half of them where a picture is decided (the last 30 % of the noise), stratified over the batch."""
    u = (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    u = torch.where(u < 0.5, u * 1.4, 0.7 + (u - 0.5) * 0.6)
    return (u * 1000).long().clamp(0, 999)


def diffusion_loss(model: Denoiser, stage: Stage, data: "Data", seed: int, step: int) -> torch.Tensor:
    g = generator(seed, stage.name, step)
    pair = data.pairs[torch.randint(len(data.pairs), (stage.batch,), generator=g)]
    clean = data.latents[pair[:, 0], pair[:, 1]]
    noise = torch.randn(clean.shape, generator=g)
    t = sample_timesteps(stage.batch, g)
    tokens = data.tokens[pair[:, 0], pair[:, 1]].clone()
    tokens[torch.rand(stage.batch, generator=g) < 0.1] = data.empty
    a = data.alphas[t].sqrt()[:, None, None, None]
    s = (1 - data.alphas[t]).sqrt()[:, None, None, None]
    noisy, target = a * clean + s * noise, a * noise - s * clean
    noisy = F.pixel_unshuffle(noisy, stage.patch).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        text = model.text_encoder(tokens).last_hidden_state
        predicted = model.unet(noisy, t, text).sample
    return F.mse_loss(F.pixel_shuffle(predicted.float(), stage.patch), target)


@dataclass
class Data:
    latents: torch.Tensor
    pairs: torch.Tensor
    tokens: torch.Tensor  # [glyphs, backgrounds, 77]
    empty: torch.Tensor
    alphas: torch.Tensor


def optimizer_for(model: Denoiser) -> Muon:
    """Muon for the weight matrices of the UNet's and the text encoder's layers, AdamW for everything else."""
    hidden, rest = [], []
    for name, p in model.named_parameters():
        edge = "conv_in" in name or "conv_out" in name or "embedding" in name
        (rest if p.ndim < 2 or edge else hidden).append(p)
    return Muon([
        {"params": hidden, "use_muon": True, "weight_decay": 0.0, "use_adjusted_lr": False, "ns_steps": 4},
        {"params": rest, "use_muon": False, "betas": (0.9, 0.98), "eps": 1e-8},
    ])  # fmt: skip


def train_stage(
    work: Path,
    stage: Stage,
    previous: Stage | None,
    data: Data,
    tokenizer: CLIPTokenizer,
    seed: int,
) -> Denoiser:
    torch.manual_seed(seed)
    model = Denoiser(new_unet(stage), new_text_encoder(tokenizer)).to(memory_format=torch.channels_last)
    if previous:
        state = torch.load(work / f"{previous.name}.pt", weights_only=True)["ema"]
        small = Denoiser(new_unet(previous), new_text_encoder(tokenizer))
        small.load_state_dict(state)
        model.text_encoder.load_state_dict(small.text_encoder.state_dict())
        grow(small.unet, model.unet)
    fit(
        work / f"{stage.name}.pt", stage.name, model, optimizer_for(model), stage.steps,
        lambda step: diffusion_loss(model, stage, data, seed, step),
        lambda step: cosine(step, stage.steps, stage.lr, stage.lr_end, stage.warmup), ema=EMA_DECAY,
    )  # fmt: skip
    model.load_state_dict(torch.load(work / f"{stage.name}.pt", weights_only=True)["ema"])
    return model


# --- the loop ------------------------------------------------------------------------------------------------------


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr if group.get("use_muon", True) else lr / 10


def fit(path: Path, name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, loss_fn, lr_fn,
        ema: float | None = None) -> None:  # fmt: skip
    """Train to ``steps``, continuing from ``path``, where the state is kept."""
    done, average = 0, {k: v.clone() for k, v in model.state_dict().items()}
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, average = state["step"], state["ema"]

    def save() -> None:
        atomic_save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done, "ema": average}, path
        )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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
                    average[key].lerp_(value, 1 - decay) if value.is_floating_point() else average[key].copy_(value)
            losses.append(loss.item())
            progress.update(task, completed=done, description=f"{name} loss {np.mean(losses[-50:]):.4f}")
            if done % 50 == 0:
                progress.console.print(
                    f"{time.strftime('%H:%M:%S')} {name} {done}/{steps} loss {np.mean(losses[-50:]):.4f}"
                )
            if time.monotonic() - saved > SAVE_EVERY or steps < 10:
                save()
                saved = time.monotonic()
    save()


# --- export --------------------------------------------------------------------------------------------------------


def export(
    out: Path,
    vae: AutoencoderTiny,
    model: Denoiser,
    tokenizer: CLIPTokenizer,
    latents: dict,
    provenance: dict[str, str],
) -> None:
    """Write a plain StableDiffusionPipeline folder in half precision, provenance in the safetensors metadata."""
    vae.register_to_config(scaling_factor=latents["scale"])
    pipe = StableDiffusionPipeline(
        vae=vae, text_encoder=model.text_encoder, tokenizer=tokenizer, unet=model.unet, scheduler=new_scheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.to(dtype=torch.float16).save_pretrained(out)
    config = out / "text_encoder" / "config.json"  # transformers loads in the dtype that stands here, diffusers in fp32
    config.write_text(
        config.read_text(encoding="utf-8").replace('"dtype": "float16"', '"dtype": "float32"'), encoding="utf-8"
    )
    for path in out.rglob("*.safetensors"):
        tensors = {k: v.contiguous() for k, v in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt", **provenance})


def check_grid(work: Path, vae: AutoencoderTiny, rgba: torch.Tensor) -> float:
    """Reconstruct some glyphs, write ``work/reconstruction.png``, return the mean PSNR in dB."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        images = torch.cat(
            [
                pictures(rgba[i : i + 4], b)
                for i, b in zip(range(0, 16, 4), ("white", "black", "light blue", "red"), strict=False)
            ]
        )
        output = vae.decode(vae.encode(images).latents).sample.float().clamp(-1, 1)
    psnr = -10 * torch.log10(((output - images) / 2).square().mean((1, 2, 3)))
    grid = (
        torch.stack([images, output], 1).flatten(0, 1)[:16].add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).numpy()
    )
    side = grid.shape[1]
    Image.fromarray(grid.reshape(4, 4, side, side, 3).transpose(0, 2, 1, 3, 4).reshape(4 * side, -1, 3)).save(
        work / "reconstruction.png"
    )
    return psnr.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--out", type=Path, help="pipeline folder to write (default: WORK/model)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything")
    parser.add_argument("--export-now", action="store_true", help="write the last stage's weights as they are")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    count = 8 if args.smoke else len(subjects.glyph_names())
    rgba = torch.from_numpy(subjects.glyphs()[:count].copy()).permute(0, 3, 1, 2)
    stages = [replace(s, steps=3, batch=2) for s in STAGES] if args.smoke else list(STAGES)
    autoencoder_steps = 4 if args.smoke else AUTOENCODER_STEPS

    vae = train_autoencoder(args.work, rgba, args.seed, autoencoder_steps)
    print(f"autoencoder: {check_grid(args.work, vae, rgba):.1f} dB")
    names, backgrounds = subjects.glyph_names()[:count], list(subjects.BACKGROUNDS)
    captions = [subjects.caption(n, b) for n in subjects.glyph_names() for b in backgrounds]
    tokenizer = new_tokenizer(captions)
    ids = tokenizer(
        [subjects.caption(n, b) for n in names for b in backgrounds], padding="max_length", return_tensors="pt"
    ).input_ids
    empty = tokenizer("", padding="max_length", return_tensors="pt").input_ids[0]
    data = Data(
        all_latents(args.work, vae, rgba),
        training_pairs(count),
        ids.view(count, len(backgrounds), -1),
        empty,
        new_scheduler().alphas_cumprod,
    )
    model = None
    if args.export_now:
        model = Denoiser(new_unet(stages[-1]), new_text_encoder(tokenizer))
        model.load_state_dict(torch.load(args.work / f"{stages[-1].name}.pt", weights_only=True)["ema"])
    else:
        for previous, stage in zip([None, *stages], stages, strict=False):
            model = train_stage(args.work, stage, previous, data, tokenizer, args.seed)
    assert model is not None
    out = args.out or args.work / "model"
    provenance = {
        "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), "seed": str(args.seed),
        "steps": json.dumps({s.name: torch.load(args.work / f"{s.name}.pt", weights_only=True)["step"] for s in stages}),
        "subjects": "Noto Emoji, Apache-2.0",
    }  # fmt: skip
    export(out, vae, model, tokenizer, torch.load(args.work / "latents.pt", weights_only=True), provenance)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
