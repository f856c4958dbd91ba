"""Train the embedded model from nothing: autoencoder, tokenizer, text encoder and UNet, on a CPU or
a GPU.

    python -m scripts.training.train_unet --work out/train    # hours on two cores; stop at will
    python -m scripts.training.train_unet --work out/train --export DIR  # newest checkpoint
    python -m scripts.training.train_unet --smoke --work DIR  # all of it in a minute, DIR/model

The recipe: the UNet's inner levels are trained first, on 8 x 8 patches of 8 x 8 latents. There a
step is cheap and every position knows its place from the padding around it. They learn which shape
in which colours a caption means. Then an outer level is put around them (16 x 16 patches of 4 x 4),
then another (32 x 32). The last one, at the end, sees the plain 64 x 64 latents. What the inner
levels know stays valid at each growth, since every cell keeps its place in the picture. They are
frozen until the new level has learnt to work with them.
"""

from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderTiny
from transformers import CLIPTokenizer

from mame_sd.embedded import model as subjects
from scripts.training import command
from scripts.training.autoencoder import all_latents, train_autoencoder
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
from scripts.training.loop import checkpoint
from scripts.training.text import caption_tokens, new_text_encoder, new_tokenizer

STAGES = (
    Stage("patch8", 8, (192, 224), (3, 4), 1100, 64, 0.01, 0.001, decided=0.8),
    Stage("patch4", 4, (128, 192, 224), (2, 3, 4), 500, 48, 0.008, 0.002, frozen=100),
    Stage("patch2", 2, (64, 128, 192, 224), (1, 2, 3, 4), 500, 16, 0.008, 0.001, frozen=120),
    Stage("patch1", 1, (32, 64, 128, 192, 224), (1, 1, 2, 3, 4), 500, 8, 0.008, 0.0, frozen=150),
)
AUTOENCODER_STEPS = 2400


def data_of(work: Path, vae: AutoencoderTiny, rgba: torch.Tensor, tokenizer: CLIPTokenizer) -> Data:
    """Latents and tokens of every glyph of `rgba` on every background."""
    names, backgrounds = subjects.glyph_names()[: len(rgba)], list(subjects.BACKGROUNDS)
    captions = [subjects.caption(n, b) for n in names for b in backgrounds]
    ids = caption_tokens(tokenizer, [*captions, ""])
    return Data(
        all_latents(work, vae, rgba),
        training_pairs(len(rgba)),
        ids[:-1].view(len(names), len(backgrounds), -1),
        ids[-1],
        new_scheduler().alphas_cumprod,
    )


def main() -> None:
    parser = command.parser_of(__doc__, STAGES)
    args = parser.parse_args()
    command.begin(args)
    stages, count, autoencoder_steps = list(STAGES), len(subjects.glyph_names()), AUTOENCODER_STEPS
    if args.smoke:
        count, autoencoder_steps = 2, 1
        small = {"steps": 1, "batch": 2}
        stages = [
            replace(s, channels=tuple(w // 2 for w in s.channels), frozen=min(s.frozen, 1), **small)
            for s in STAGES
        ]
    rgba = torch.from_numpy(subjects.glyphs()[:count].copy()).permute(0, 3, 1, 2)
    vae = train_autoencoder(args.work, rgba, args.seed, autoencoder_steps)
    backgrounds = list(subjects.BACKGROUNDS)
    captions = [subjects.caption(n, b) for n in subjects.glyph_names() for b in backgrounds]
    tokenizer = new_tokenizer(captions)
    data = data_of(args.work, vae, rgba, tokenizer)

    def train(stage: Stage, previous: Stage | None) -> None:
        train_stage(args.work, stage, previous, data, tokenizer, args.seed)

    stage, steps = command.trained(parser, args, stages, train)
    model = Denoiser(new_unet(stage), new_text_encoder(tokenizer))
    model.load_state_dict(checkpoint(args.work, stage)["ema"])
    out = command.export_folder(args)
    if out:
        latents = torch.load(args.work / "latents.pt", weights_only=True)
        origin = command.provenance(command.modules(), args.seed, steps)
        export(out, vae, model, tokenizer, latents, origin)
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
