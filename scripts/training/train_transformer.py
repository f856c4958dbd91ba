"""Train the embedded transformer (joint attention of text and image) in a world where tokens need
one another, on a CPU.

    python -m scripts.training.train_transformer --work DIR                   # ten hours, two cores
    python -m scripts.training.train_transformer --work DIR --until tokens64  # up to this stage
    python -m scripts.training.train_transformer --work DIR --export MODEL    # newest checkpoint
    python -m scripts.training.train_transformer --work DIR --smoke  # all of it in a minute

A stopped training continues when it is started again. `--export` writes a pipeline folder,
`--smoke` writes one into DIR/model.

The recipe is the UNet's: coarse first. 64 tokens of 4 x 4 latents of pictures at half the side
learn where things are and in which colours. 256 tokens at the full side learn the details. 1,024
tokens of 2 x 2 latents, the form that is shipped, refine them. The world is `world.py`.

Why this form:

- ``SD3Transformer2DModel`` in a ``StableDiffusion3Pipeline`` without T5. Instead of T5's states the
  pipeline puts 256 zero tokens after the prompt's 20. They are all equal and stay equal. So
  training runs one of them and counts it 256 times (`joint.py`, `CountedAttention`). What is
  trained is exactly what the pipeline computes.
- Two text encoders, for the pipeline wants two. One is the embedded model's, which knows the names
  and colours already and is trained on. The other is a single layer whose hidden state but one is
  the words themselves. Widths 192 + 64 are the ``joint_attention_dim``, so that nothing is padded.
- Width 256 in 6 blocks (13.8 M) rather than 192 in 10 (13.2 M). It does 31, 10.5 and 1.7 against
  27, 8.0 and 1.4 pictures a second at 64, 256 and 1,024 tokens on one thread.
- Noise levels: logit-normal, shifted by 4 at 32 x 32 latents and 6 at 64 x 64. There averaging over
  four times the latents leaves half the noise.
"""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import CLIPTokenizer

from mame_sd.embedded.scenes import SUBJECTS
from scripts.training import command, joint
from scripts.training.growth import grow
from scripts.training.joint import Denoiser, Stage
from scripts.training.joint_export import export
from scripts.training.loop import checkpoint, fit
from scripts.training.pool import Pool
from scripts.training.text import Tokens

STAGES = (
    Stage("tokens64", 32, 4, 1500, 48, 0.01, 4.0, (1200, 0.15)),
    Stage("tokens256", 64, 4, 900, 24, 0.006, 6.0, (1450, 0.4)),
    Stage("tokens1024", 64, 2, 480, 8, 0.004, 6.0, (1810, 0.1)),
)


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
    parser = command.parser_of(__doc__, STAGES)
    args = parser.parse_args()
    command.begin(args)
    stages, glyphs, shard = list(STAGES), len(SUBJECTS), 64
    if args.smoke:
        stages = [replace(s, steps=1, batch=2, pool=(4, 0), pairs=0.5) for s in STAGES]
        glyphs, shard = 8, 4
    pools = {
        kind: Pool(args.work / "pool", args.seed, glyphs, kind, shard)
        for kind in ("single", "pairs", "held-out")
    }
    tokens = Tokens(joint.joint_tokenizer())

    def train(stage: Stage, previous: Stage | None) -> None:
        train_stage(args.work, stage, previous, pools, tokens, args.seed)

    stage, steps = command.trained(parser, args, stages, train)
    model = load_average(args.work, stage, tokens.tokenizer)
    out = command.export_folder(args)
    if out:
        export(
            out, model, tokens.tokenizer, command.provenance(command.modules(), args.seed, steps)
        )
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
