"""Train the embedded CLIP: a small ViT and text encoder that tell 180 glyphs apart in a world of
grounds, on a CPU.

    python scripts/train_clip.py --work out/clip                    # stop and start at will
    python scripts/train_clip.py --work out/clip --until tokens64   # no further than this stage
    python scripts/train_clip.py --work out/clip --sample           # top-1 of the newest checkpoint
    on held-out pictures python scripts/train_clip.py --work out/clip --export DIR       # the
    newest checkpoint in transformers' format python scripts/train_clip.py --work out/clip --draw
    DIR         # held-out pictures in class folders, for mame-sd-eval classify; --plain: not
    crowded python scripts/train_clip.py --work out/more --start DIR        # the last stage alone,
    from an exported model python scripts/train_clip.py --smoke --work DIR                 #
    everything in a minute, into DIR/model and DIR/pictures

The recipe is that of the other embedded models: coarse first. 64 patches of pictures at half the
side learn glyphs and words; 256 patches at the full side see the small ones. Pictures are drawn
anew at each step (`embedded_training/pictures.py`): one glyph at a free place, size and angle,
partly hidden, on varied grounds. The text half starts as the embedded model's, which knows the
words. The last stage strews halves of other glyphs over the one that is named, so that few tokens
are redundant; the text half stays as it is there.
"""

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from embedded_training import contrast, joint, pictures, world
from embedded_training.contrast import Stage
from embedded_training.loop import checkpoint, fit, train_stages
from PIL import Image
from train_transformer import Tokens
from transformers import CLIPModel, CLIPTokenizer

from mame_sd.embedded import model as subjects

STAGES = (
    Stage("tokens64", 128, 3000, 64, 128, 0.01),
    Stage("tokens256", 256, 850, 32, 160, 0.004),
    Stage("crowd256", 256, 450, 32, 0, 0.003, decay=0.6, crowd=120, ramp=1, locked=True),
)
HELD_OUT = 720  # pictures that --sample looks at


def script_hash() -> str:
    """SHA-256 of this script and the modules that it trains with."""
    modules = [pictures, contrast, joint, world]
    files = [Path(__file__), *(Path(str(module.__file__)) for module in modules)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def load_average(work: Path, stage: Stage, tokenizer: CLIPTokenizer) -> CLIPModel:
    model = contrast.new_model(stage, tokenizer)
    model.load_state_dict(checkpoint(work, stage)["ema"])
    return model.eval()


def train_stage(
    work: Path,
    stage: Stage,
    previous: Stage | None,
    names: tuple[str, ...],
    tokens: Tokens,
    seed: int,
    start: Path | None = None,
) -> None:
    torch.manual_seed(seed)
    model = contrast.new_model(stage, tokens.tokenizer)
    if stage.locked:
        for part in (model.text_model, model.text_projection):
            part.requires_grad_(False)
    if start and not (work / f"{stage.name}.pt").exists():
        contrast.grow(CLIPModel.from_pretrained(start), model)
    elif previous and not (work / f"{stage.name}.pt").exists():
        contrast.grow(load_average(work, previous, tokens.tokenizer), model)
    with contrast.drawn_ahead(
        lambda step: contrast.draw_batch(names, stage, seed, step), stage.steps
    ) as batch:
        fit(
            work / f"{stage.name}.pt",
            stage.name,
            model,
            joint.optimizer_for(model),
            stage.steps,
            lambda step: contrast.contrastive_loss(model, tokens, stage, batch(step)),
            lambda step: joint.learning_rate(stage, step),
            ema=stage.ema,
        )


def draw(
    out: Path, names: tuple[str, ...], each: int, seed: int, crowd: tuple[int, int] | None
) -> None:
    """Held-out pictures in class folders, ``each`` of them a glyph; those that are there stay."""
    for name in names:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        for n in range(each):
            file = folder / f"{n:04d}.png"
            if not file.exists():
                rng = pictures.rng_of(seed, f"drawn {name}", n)
                pixels, _ = pictures.draw(rng, (name,), held_out=True, crowd=crowd)
                part = file.with_suffix(".part")
                Image.fromarray(pixels).save(part, "PNG")
                part.replace(file)


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
        "--start",
        type=Path,
        metavar="DIR",
        help="a CLIP that --export wrote, to begin the last stage from; give it again to go on",
    )
    parser.add_argument(
        "--sample", action="store_true", help="print top-1 on held-out pictures; train nothing"
    )
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="write the newest checkpoint; train nothing"
    )
    parser.add_argument(
        "--draw", type=Path, metavar="DIR", help="write held-out pictures; train nothing"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="--draw: each glyph alone, no crowd of pieces around it",
    )
    parser.add_argument(
        "--each", type=int, default=10, help="pictures of each glyph that --draw writes"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    args.work.mkdir(parents=True, exist_ok=True)
    stages, names, each, held_out = list(STAGES), subjects.glyph_names(), args.each, HELD_OUT
    if args.smoke:
        stages = [replace(s, steps=2, batch=4, negatives=4) for s in STAGES]
        names, each, held_out = names[:6], 2, 8
    crowd = None if args.plain else pictures.CROWD
    if args.draw:
        draw(args.draw, names, each, args.seed, crowd)
        print(f"wrote {args.draw}")
        return
    if args.start:
        if args.until != stages[-1].name:
            parser.error(
                f"--until {args.until}: expected none beside --start, which trains the last stage"
                " alone; leave it out"
            )
        stages = stages[-1:]
    tokens = Tokens(joint.joint_tokenizer())
    begun = [s for s in stages if (args.work / f"{s.name}.pt").exists()]
    if not args.sample and not args.export:
        begun = train_stages(
            args.work,
            stages,
            args.until,
            lambda stage, previous: train_stage(
                args.work, stage, previous, names, tokens, args.seed, args.start
            ),
        )
    if not begun:
        parser.error(f"--work {args.work}: expected a checkpoint, found none; train first")
    stage = begun[-1]
    steps = {s.name: checkpoint(args.work, s)["step"] for s in begun}
    model = load_average(args.work, stage, tokens.tokenizer)
    if args.sample or args.smoke:
        for kind, crowded in (("plain", None), ("crowded", pictures.CROWD)):
            share = contrast.top1(model, tokens, names, stage.side, args.seed, held_out, crowded)
            print(
                f"{stage.name}, {steps[stage.name]} steps: top-1 of {len(names)} on {held_out}"
                f" held-out {kind} pictures {share:.1%}"
            )
    out = args.export or (args.work / "model" if args.smoke else None)
    if out:
        provenance = {
            "script_sha256": script_hash(),
            "seed": str(args.seed),
            "steps": json.dumps(steps),
            "subjects": "Noto Emoji, Apache-2.0",
        }
        contrast.export(out, model, tokens.tokenizer, provenance)
        print(f"wrote {out}")
    if args.smoke:
        draw(args.work / "pictures", names, each, args.seed, crowd)


if __name__ == "__main__":
    main()
