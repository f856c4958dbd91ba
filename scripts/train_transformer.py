"""Train the embedded transformer (joint attention of text and image) in a world where tokens need
one another, on a CPU.

    python scripts/train_transformer.py --work out/transformer                 # ten hours on two
    cores; stop and start at will python scripts/train_transformer.py --work out/transformer --until
    tokens64   # no further than this stage python scripts/train_transformer.py --work
    out/transformer --sample        # pictures of the newest checkpoint, losses python
    scripts/train_transformer.py --work out/transformer --export DIR    # the newest checkpoint as a
    pipeline folder python scripts/train_transformer.py --smoke --work DIR                     #
    everything in a minute, into DIR/model

The recipe is the UNet's: coarse first. 64 tokens of 4 x 4 latents of pictures at half the side
learn what stands where in which colours; 256 tokens at the full side learn the details; 1,024
tokens of 2 x 2 latents, the form that is shipped, refine them. The world is
`embedded_training/world.py`.

Why this form:

- ``SD3Transformer2DModel`` in a ``StableDiffusion3Pipeline`` without T5. Instead of T5's states the
  pipeline puts 256 zero tokens after the prompt's 20. They are all equal and stay equal, so that
  training runs one of them and counts it 256 times (`embedded_training/joint.py`,
  `CountedAttention`): what is trained is exactly what the pipeline computes.
- Two text encoders, for the pipeline wants two: the embedded model's, which knows the names and
  colours already and is trained on, and a single layer whose hidden state but one is the words
  themselves. Widths 192 + 64 are the ``joint_attention_dim``, so that nothing is padded.
- Width 256 in 6 blocks (13.8 M) rather than 192 in 10 (13.2 M): 31, 10.5 and 1.7 against 27, 8.0
  and 1.4 pictures a second at 64, 256 and 1,024 tokens on one thread.
- Noise levels: logit-normal, shifted by 4 at 32 x 32 latents and 6 at 64 x 64, where averaging over
  four times the latents leaves half the noise.
"""

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from embedded_training import joint
from embedded_training.growth import grow
from embedded_training.joint import Denoiser, Stage
from embedded_training.joint_export import export, sample_sheet
from embedded_training.loop import checkpoint, fit, train_stages
from embedded_training.pool import Pool
from embedded_training.probe import probe
from transformers import CLIPTokenizer

from mame_sd.embedded.scenes import SUBJECTS

STAGES = (
    Stage("tokens64", 32, 4, 1500, 48, 0.01, 4.0, (1200, 0.15)),
    Stage("tokens256", 64, 4, 900, 24, 0.006, 6.0, (1450, 0.4)),
    Stage("tokens1024", 64, 2, 480, 8, 0.004, 6.0, (1810, 0.1)),
)


def script_hash() -> str:
    """SHA-256 of this script and the modules beside it."""
    files = [Path(__file__), *sorted((Path(__file__).parent / "embedded_training").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def caption_tokens(tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    rows: torch.Tensor = tokenizer(
        captions, padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    return rows


class Tokens(dict[str, torch.Tensor]):
    """Tokens of a caption, computed when first asked for."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, caption: str) -> torch.Tensor:
        self[caption] = caption_tokens(self.tokenizer, [caption])[0]
        return self[caption]


def load_average(work: Path, stage: Stage, tokenizer: CLIPTokenizer) -> Denoiser:
    model = joint.new_denoiser(stage, tokenizer)
    model.load_state_dict(checkpoint(work, stage)["ema"])
    return model


def train_stage(
    work: Path,
    stage: Stage,
    previous: Stage | None,
    pools: dict[str, Pool],
    tokens: Tokens,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = joint.new_denoiser(stage, tokens.tokenizer)
    if previous and not (work / f"{stage.name}.pt").exists():
        grow(
            load_average(work, previous, tokens.tokenizer),
            previous,
            model,
            stage,
            pools,
            tokens,
            seed,
        )
    fit(
        work / f"{stage.name}.pt",
        stage.name,
        model,
        joint.optimizer_for(model),
        stage.steps,
        lambda step: joint.flow_loss(model, pools, tokens, stage, seed, step),
        lambda step: joint.learning_rate(stage, step),
        ema=stage.ema,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="1 beside other work, 2 on two idle cores"
    )
    parser.add_argument(
        "--until",
        choices=[s.name for s in STAGES],
        default=STAGES[-1].name,
        help="the last stage to train",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="write WORK/STAGE-STEP.png and print losses; train nothing",
    )
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="write the newest checkpoint; train nothing"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    args.work.mkdir(parents=True, exist_ok=True)
    stages, glyphs, shard = list(STAGES), len(SUBJECTS), 64
    if args.smoke:
        stages = [replace(s, steps=2, batch=2, pool=(4, 0), pairs=0.5) for s in STAGES]
        glyphs, shard = 8, 4
    pools = {
        kind: Pool(args.work / "pool", args.seed, glyphs, kind, shard)
        for kind in ("single", "pairs", "held-out")
    }
    tokens = Tokens(joint.joint_tokenizer())
    begun = [s for s in stages if (args.work / f"{s.name}.pt").exists()]
    if not args.sample and not args.export:
        begun = train_stages(
            args.work,
            stages,
            args.until,
            lambda stage, previous: train_stage(
                args.work, stage, previous, pools, tokens, args.seed
            ),
        )
    stage = begun[-1]
    steps = {s.name: checkpoint(args.work, s)["step"] for s in begun}
    model = load_average(args.work, stage, tokens.tokenizer)
    if args.sample:
        probe(model, pools["held-out"], tokens, stage, args.seed)
        path = sample_sheet(
            args.work / f"{stage.name}-{steps[stage.name]:05d}.png", model, tokens.tokenizer, stage
        )
        print(f"wrote {path}")
    out = args.export or (args.work / "model" if args.smoke else None)
    if out:
        provenance = {
            "script_sha256": script_hash(),
            "seed": str(args.seed),
            "steps": json.dumps(steps),
            "subjects": "Noto Emoji, Apache-2.0",
        }
        export(out, model, tokens.tokenizer, provenance)
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
