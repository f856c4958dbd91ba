"""Train the embedded model from nothing: autoencoder, tokenizer, text encoder and UNet, on a CPU or
a GPU.

    python -m scripts.training.render_glyphs                  # once: the subjects
    python -m scripts.training.train_unet --work out/train    # hours on two cores; stop at will
    # all of it in a minute, into DIR/model:
    python -m scripts.training.train_unet --smoke --work DIR

The recipe: the UNet's inner levels are trained first, on 8 x 8 patches of 8 x 8 latents. There a
step is cheap and every position knows its place from the padding around it. They learn which shape
in which colours a caption means. Then an outer level is put around them (16 x 16 patches of 4 x 4),
then another (32 x 32). The last one, at the end, sees the plain 64 x 64 latents. What the inner
levels know stays valid at each growth, since every cell keeps its place in the picture. They are
frozen until the new level has learnt to work with them.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from mame_sd.embedded import model as subjects
from scripts.training import command
from scripts.training.autoencoder import all_latents, check_grid, train_autoencoder
from scripts.training.diffusion import (
    Data,
    Denoiser,
    Stage,
    new_scheduler,
    new_unet,
    train_stage,
    training_pairs,
)
from scripts.training.export import export
from scripts.training.text import new_text_encoder, new_tokenizer

STAGES = (
    Stage("patch8", 8, (192, 224), (3, 4), 1100, 64, 0.01, 0.001, decided=0.8),
    Stage("patch4", 4, (128, 192, 224), (2, 3, 4), 500, 48, 0.008, 0.002, frozen=100),
    Stage("patch2", 2, (64, 128, 192, 224), (1, 2, 3, 4), 500, 16, 0.008, 0.001, frozen=120),
    Stage("patch1", 1, (32, 64, 128, 192, 224), (1, 1, 2, 3, 4), 500, 8, 0.008, 0.0, frozen=150),
)
AUTOENCODER_STEPS = 2400


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--out", type=Path, help="pipeline folder to write (default: WORK/model)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything")
    parser.add_argument(
        "--export-now", action="store_true", help="write the last stage's weights as they are"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    count = 2 if args.smoke else len(subjects.glyph_names())
    rgba = torch.from_numpy(subjects.glyphs()[:count].copy()).permute(0, 3, 1, 2)
    stages = (
        [
            replace(
                s,
                channels=tuple(width // 2 for width in s.channels),
                steps=1,
                batch=2,
                frozen=min(s.frozen, 1),
            )
            for s in STAGES
        ]
        if args.smoke
        else list(STAGES)
    )
    autoencoder_steps = 1 if args.smoke else AUTOENCODER_STEPS

    vae = train_autoencoder(args.work, rgba, args.seed, autoencoder_steps)
    print(f"autoencoder: {check_grid(args.work, vae, rgba):.1f} dB")
    names, backgrounds = subjects.glyph_names()[:count], list(subjects.BACKGROUNDS)
    captions = [subjects.caption(n, b) for n in subjects.glyph_names() for b in backgrounds]
    tokenizer = new_tokenizer(captions)
    ids = tokenizer(
        [subjects.caption(n, b) for n in names for b in backgrounds],
        padding="max_length",
        return_tensors="pt",
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
        model.load_state_dict(
            torch.load(args.work / f"{stages[-1].name}.pt", weights_only=True)["ema"]
        )
    else:
        for previous, stage in zip([None, *stages], stages, strict=False):
            model = train_stage(args.work, stage, previous, data, tokenizer, args.seed)
    assert model is not None
    out = args.out or args.work / "model"
    steps = {
        stage.name: torch.load(args.work / f"{stage.name}.pt", weights_only=True)["step"]
        for stage in stages
    }
    export(
        out,
        vae,
        model,
        tokenizer,
        torch.load(args.work / "latents.pt", weights_only=True),
        command.provenance(command.modules(), args.seed, steps),
    )
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
