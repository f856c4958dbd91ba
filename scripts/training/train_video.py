"""Train the embedded video classifier: a small VideoMAE that says which glyph moves and how.

    python -m scripts.training.train_video --work out/video                 # stop, start at will
    python -m scripts.training.train_video --work out/video --export DIR    # write the newest
    python -m scripts.training.train_video --clips out/clips --each 20      # clips to measure on

One batch in four is of smaller frames, one in four lacks tubelets: a rival that sees these is no
stranger to the model. Merging is never trained on. Beside the answer, each token learns which glyph
it shows and how that moves; this head is thrown away.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from rich.progress import track
from torch import Tensor, nn
from transformers import VideoMAEConfig, VideoMAEForVideoClassification, VideoMAEImageProcessorPil

from mame_sd.runs.files import written_whole
from scripts.training import clips
from scripts.training.clips import CLASSES, FRAMES, MOTIONS, NAMES, SIDE
from scripts.training.contrast import MEAN, STD
from scripts.training.loop import fit, generator, muon

PATCH, TUBELET = 8, 2  # pixels; frames
WIDTH, BLOCKS, HEADS, MLP = 96, 6, 3, 192
GRID, DEPTH = SIDE // PATCH, FRAMES // TUBELET
SMALLER = (40, 48, 56)  # pixels
SHARE = 0.25  # of the batches that are smaller, or shorter
BATCH, STEPS, WARMUP = 48, 2000, 50
RATE = 0.02  # of Muon; AdamW's is a tenth
DENSE = len(CLASSES) + len(NAMES) + 1  # what a token may show: what moves how, what stands, ground
COVERED = 0.3  # of a token's pixels, from which on it shows a glyph
EMA = 0.998


def new_model() -> VideoMAEForVideoClassification:
    """The classifier, random weights."""
    config = VideoMAEConfig(
        image_size=SIDE,
        patch_size=PATCH,
        num_frames=FRAMES,
        tubelet_size=TUBELET,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        intermediate_size=MLP,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: n for n, name in enumerate(CLASSES)},
    )
    return VideoMAEForVideoClassification(config)


class Learner(nn.Module):
    """The classifier and the head that is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()
        self.dense = nn.Linear(WIDTH, DENSE)

    def forward(self, pixels: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, classes] and of each token [B, L, DENSE]; `places`: of the tokens that are
        seen, among those of full size.
        """
        inner = self.model.videomae
        x = inner.embeddings.patch_embeddings.projection(pixels.transpose(1, 2))
        depth, side = x.shape[2], x.shape[-1]
        every = torch.arange(depth * side * side).view(depth, side, side)
        nearest = ((torch.arange(side) + 0.5) * GRID / side).long()
        at = torch.arange(DEPTH * GRID * GRID).view(DEPTH, GRID, GRID)[:, nearest][:, :, nearest]
        x = x.flatten(2).transpose(1, 2) + inner.embeddings.position_embeddings[:, at.flatten()]
        x = inner.encoder(x[:, every[places].flatten()]).last_hidden_state
        return self.model.classifier(self.model.fc_norm(x.mean(1))), self.dense(x)


def shown_by_tokens(shown: Tensor, batch: list[clips.Clip], side: int) -> Tensor:
    """What each token shows [B, DEPTH, side, side], as a number below DENSE."""
    marks = torch.stack([(shown == n).float() for n in (1, 2)], 1)
    parts = F.adaptive_avg_pool3d(marks, (DEPTH, side, side))
    most, which = parts.max(1)
    moving = torch.tensor([clip.label for clip in batch])[:, None, None, None]
    standing = torch.tensor([len(CLASSES) + c.standing for c in batch])[:, None, None, None]
    glyph = torch.where(which == 0, moving, standing)
    return torch.where(most > COVERED, glyph, DENSE - 1)


def loss_of(learner: Learner, step: int, batch_size: int) -> Tensor:
    """The loss of this step's clips."""
    batch = [clips.draw(0, "train", step * batch_size + n) for n in range(batch_size)]
    frames, shown = clips.render(batch)
    g = generator(0, "video", step)
    kind = torch.rand((), generator=g).item()
    side, places = SIDE, torch.arange(DEPTH)
    if kind < SHARE:
        side = SMALLER[int(torch.randint(len(SMALLER), (), generator=g))]
        frames = F.interpolate(frames.flatten(0, 1), (side, side), mode="bicubic", antialias=True)
        frames = frames.unflatten(0, (batch_size, FRAMES))
    elif kind < 2 * SHARE:
        left = int(torch.randint(2, DEPTH, (), generator=g))
        places = torch.randperm(DEPTH, generator=g)[:left].sort().values
    pixels = (frames.round() / 255 - MEAN) / STD
    logits, tokens = learner(pixels, places)
    seen = shown_by_tokens(shown, batch, side // PATCH)[:, places].flatten(1)
    labels = torch.tensor([clip.label for clip in batch])
    chances = logits.float().log_softmax(-1).unflatten(-1, (len(NAMES), len(MOTIONS)))
    weights = torch.ones(DENSE)
    weights[-1] = 0.2  # most tokens show the ground
    return (
        F.nll_loss(chances.flatten(1), labels)
        + 0.5 * F.nll_loss(chances.logsumexp(2), labels // len(MOTIONS))
        + 0.5 * F.nll_loss(chances.logsumexp(1), labels % len(MOTIONS))
        + F.cross_entropy(tokens.flatten(0, 1), seen.flatten(), weights)
    )


def train(work: Path, steps: int, batch_size: int) -> None:
    """Train up to `steps`, from where it was stopped."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    learner = Learner().train()
    optimizer = muon(learner, lambda name: ".layer." in name, decay=0.02)

    def rate(step: int) -> float:
        return RATE * min(1.0, (step + 1) / WARMUP, max(0.02, (steps - step) / (0.6 * steps)))

    fit(
        work / "state.pt",
        "video",
        learner,
        optimizer,
        steps,
        lambda step: loss_of(learner, step, batch_size),
        rate,
        ema=EMA,
    )


def load(work: Path) -> VideoMAEForVideoClassification:
    """The classifier as it stands, its weights averaged over steps."""
    learner = Learner()
    learner.load_state_dict(torch.load(work / "state.pt", weights_only=True)["ema"])
    return learner.model.eval()


def export(work: Path, folder: Path) -> None:
    """Writes the classifier in transformers' format, float16, with its processor."""
    load(work).half().save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    VideoMAEImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=[MEAN] * 3, image_std=[STD] * 3
    ).save_pretrained(folder)


def write_clips(folder: Path, each: int) -> None:
    """Clips that none is trained on, `each` of every class: folders of frames in class folders."""
    left, index = dict.fromkeys(range(len(CLASSES)), each), 0
    with_progress = track(range(each * len(CLASSES)), f"drawing clips into {folder}")
    for _ in with_progress:
        while True:
            clip = clips.draw(0, "test", index, held_out=True)
            index += 1
            if left[clip.label]:
                break
        left[clip.label] -= 1
        out = folder / CLASSES[clip.label] / f"{index - 1:05}"
        if (out / f"{FRAMES - 1}.png").exists():
            continue
        frames = clips.render([clip])[0][0].round().byte().permute(0, 2, 3, 1).numpy()
        for number, frame in enumerate(frames):
            file = out / f"{number}.png"
            with written_whole(file) as stream:
                Image.fromarray(frame).save(stream, "PNG")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, help="folder for the training state")
    add("--steps", type=int, default=STEPS, help=f"of {BATCH} clips each (default {STEPS})")
    add("--batch", type=int, default=BATCH, help="clips of a step")
    add("--export", type=Path, metavar="DIR", help="write the newest state; train nothing")
    add("--clips", type=Path, metavar="DIR", help="write clips to measure on; train nothing")
    add("--each", type=int, default=20, help="how many clips of each class")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.clips:
        write_clips(args.clips, args.each)
    elif not args.work:
        parser.error("expected --work or --clips, got neither")
    elif args.export:
        export(args.work, args.export)
    else:
        train(args.work, args.steps, args.batch)


if __name__ == "__main__":
    main()
