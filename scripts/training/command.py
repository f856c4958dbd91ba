"""What the commands that train embedded models share: options, a run that stops and continues, and
what the exported file says of its origin.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from scripts.training.loop import Named, S, checkpoint, train_stages


def parser_of(about: str | None, stages: Sequence[Named]) -> argparse.ArgumentParser:
    """The common options.

    Args:
        about: the script's docstring.
        stages: in order; `--until` takes their names.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [stage.name for stage in stages]
    add("--work", type=Path, required=True, help="folder for the training state")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="1 beside other work, 2 on two idle cores")
    add("--until", choices=names, default=names[-1], help="the last stage to train")
    add("--export", type=Path, metavar="DIR", help="write the newest checkpoint; train nothing")
    add("--smoke", action="store_true", help="a few steps of everything")
    return parser


def begin(args: argparse.Namespace) -> None:
    """Threads, determinism and the folder of the options."""
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    args.work.mkdir(parents=True, exist_ok=True)


def trained(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    stages: list[S],
    train: Callable[[S, S | None], None],
) -> tuple[S, dict[str, int]]:
    """Trains up to `--until`, or trains nothing with `--export`.

    Returns the newest stage that has a checkpoint, and the steps of each such stage by name. Ends
    the command where there is no checkpoint.
    """
    begun = [stage for stage in stages if (args.work / f"{stage.name}.pt").exists()]
    if not args.export:
        begun = train_stages(args.work, stages, args.until, train)
    if not begun:
        parser.error(f"--work {args.work}: expected a checkpoint, found none; train first")
    return begun[-1], {stage.name: checkpoint(args.work, stage)["step"] for stage in begun}


def export_folder(args: argparse.Namespace) -> Path | None:
    """Where the options say that the model goes; None: nowhere."""
    folder: Path | None = args.export or (args.work / "model" if args.smoke else None)
    return folder


def provenance(files: Iterable[Path], seed: int, steps: dict[str, int]) -> dict[str, str]:
    """Metadata of the exported weights: the code that trained them, their seed and their steps."""
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {
        "script_sha256": code.hexdigest(),
        "seed": str(seed),
        "steps": json.dumps(steps),
        "subjects": "Noto Emoji, Apache-2.0",
    }


def modules() -> list[Path]:
    """All modules of this package, in order of their names."""
    return sorted(Path(__file__).parent.glob("*.py"))
