"""Train the embedded CLIP on a CPU: a small ViT and a text encoder that tell 180 glyphs apart.

    python -m scripts.training.train_clip --work out/clip                   # stop, start at will
    python -m scripts.training.train_clip --work out/clip --until tokens64  # up to this stage
    python -m scripts.training.train_clip --work out/clip --export DIR      # newest checkpoint
    python -m scripts.training.train_clip --work out/clip --draw DIR        # held-out pictures
    python -m scripts.training.train_clip --work out/more --start DIR       # the last stage alone
    python -m scripts.training.train_clip --smoke --work DIR                # all of it in a minute

`--export` writes transformers' format, which `--start` takes. `--draw` writes class folders for
`mame-sd-eval classify`; with `--plain` the glyphs are not crowded. `--smoke` writes DIR/model and
DIR/pictures.

The recipe is that of the other embedded models: coarse first. 64 patches of pictures at half the
side learn glyphs and words; 256 patches at the full side see the small ones. Pictures are drawn
anew at each step (`pictures.py`): one glyph at a free place, size and angle, partly hidden, on
varied grounds. The text half starts as the embedded model's, which knows the words. The last stage
strews halves of other glyphs over the one that is named, so that few tokens are redundant. It
leaves the text half as it is.
"""

from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from transformers import CLIPModel, CLIPTokenizer

from mame_sd.embedded import model as subjects
from scripts.training import command, contrast, joint, pictures, world
from scripts.training.contrast import Stage
from scripts.training.loop import checkpoint, fit
from scripts.training.text import Tokens

STAGES = (
    Stage("tokens64", 128, 3000, 64, 128, 0.01),
    Stage("tokens256", 256, 850, 32, 160, 0.004),
    Stage("crowd256", 256, 450, 32, 0, 0.003, decay=0.6, crowd=120, ramp=1, locked=True),
)


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

    def loss(step: int) -> torch.Tensor:
        batch = contrast.draw_batch(names, stage, seed, step)
        return contrast.contrastive_loss(model, tokens, stage, batch)

    fit(
        work / f"{stage.name}.pt",
        stage.name,
        model,
        joint.optimizer_for(model),
        stage.steps,
        loss,
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
    parser = command.parser_of(__doc__, STAGES)
    add = parser.add_argument
    add("--start", type=Path, metavar="DIR", help="begin the last stage from an exported CLIP")
    add("--draw", type=Path, metavar="DIR", help="write held-out pictures; train nothing")
    add("--plain", action="store_true", help="--draw: each glyph alone, without a crowd of pieces")
    add("--each", type=int, default=10, help="pictures of each glyph that --draw writes")
    args = parser.parse_args()
    command.begin(args)
    stages, names, each = list(STAGES), subjects.glyph_names(), args.each
    if args.smoke:
        stages = [replace(s, steps=1, batch=4, negatives=4) for s in STAGES]
        names, each = names[:6], 2
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

    def train(stage: Stage, previous: Stage | None) -> None:
        train_stage(args.work, stage, previous, names, tokens, args.seed, args.start)

    stage, steps = command.trained(parser, args, stages, train)
    model = load_average(args.work, stage, tokens.tokenizer)
    out = command.export_folder(args)
    if out:
        files = [Path(str(module.__file__)) for module in (pictures, contrast, joint, world)]
        origin = command.provenance([Path(__file__), *files], args.seed, steps)
        contrast.export(out, model, tokens.tokenizer, origin)
        print(f"wrote {out}")
    if args.smoke:
        draw(args.work / "pictures", names, each, args.seed, crowd)


if __name__ == "__main__":
    main()
