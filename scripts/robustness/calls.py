"""Call `mame_sd.attention` with any arguments, and `mame-sd generate` with hostile files.

    python -m scripts.robustness.calls [--seed 0] [--cases 200] [--kinds masks,broken,files]

masks: A mask of any form lies over an image and text. It is held if the outputs are finite and near
the range of the values wherever exact attention is finite, and if those of a mask for all queries
don't depend on hidden values; "refused" if one line of ours says so.
broken: One argument has another shape, dtype, kind or range. It is held if this package raises
ValueError or TypeError with one line.
files: Folders are nested deeply, or input is huge. It is "refused" if one line says so within a
minute, and held if images are made.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mame_sd
from mame_sd import attention
from mame_sd.cli.app import run as generate
from scripts.robustness.apart import Draw, main
from tests.builders.tiny import save_tiny_pipeline

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def drawn(draw: Draw) -> dict[str, Any]:
    """Draw the arguments of a valid call."""
    grid = [draw.randint(1, 12) for _ in range(draw.randint(1, 3))]
    before, after = draw.randint(0, 9), draw.randint(0, 9)
    batch, shared, heads, width = (draw.randint(1, 3) for _ in range(4))
    generator = torch.Generator().manual_seed(draw.randrange(2**32))
    count, tokens = before + math.prod(grid) + after, math.prod(grid)
    dtype = draw.choice(DTYPES)

    def made(heads: int, tokens: int) -> Tensor:
        size = 10 ** draw.uniform(-2, 2)
        return (size * torch.randn(batch, heads, tokens, 8 * width, generator=generator)).to(dtype)

    return {
        "q": made(shared * heads, draw.choice([count, tokens])),
        "k": made(heads, count),
        "v": made(heads, count),
        "grid": tuple(grid),
        "before": before,
        "after": after,
        "keep": draw.uniform(0.01, 0.99),
    }


def masked(draw: Draw) -> str:
    call = drawn(draw)
    q, k, v = (call[name] for name in "qkv")
    sizes = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]
    shape = [draw.choice([1, side]) for side in sizes[:3]] + sizes[3:]
    share, seed = draw.random(), draw.randrange(2**32)
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    if draw.random() < 0.5:  # each query sees all of the image or none of it
        seen[..., call["before"] : seen.shape[-1] - call["after"]] = True
    mask = seen if draw.random() < 0.5 else torch.where(seen, 0.0, -math.inf).to(q.dtype)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    told = f"{sizes}, {shape}, {call['grid']}, {q.dtype}"
    try:
        found = attention(**call, attn_mask=mask)
    except ValueError as error:
        if str(error).startswith("attn_mask: expected"):
            return "refused"
        raise
    answered = exact.isfinite()
    assert bool(found.isfinite()[answered].all()), f"{told}: not finite"
    high = 1.6 * float(v.abs().max())
    assert float(found[answered].abs().max() if answered.any() else 0) <= high, f"{told}: too far"
    if seen.shape[1:3] != (1, 1):
        return "held"
    hidden = ~seen.flatten(0, -2).any(0)
    call["v"] = v.masked_fill(hidden.view(1, 1, -1, 1), 0)
    again = attention(**call, attn_mask=mask)
    torch.testing.assert_close(again[answered], found[answered], rtol=0.1, atol=0.1 * high)
    return "held"


def broken(draw: Draw) -> str:
    call = drawn(draw)
    q, k, v = (call[name] for name in "qkv")
    length = k.shape[2]
    name, value = draw.choice(
        [
            ("q", q.tolist()), ("q", None), ("q", q[0]), ("q", q[:, :0]), ("q", q[..., :-1]),
            ("q", q.int()), ("q", q.half()), ("q", q.to("meta")), ("q", torch.cat([q, q])),
            ("k", k[:, :, 1:]), ("k", k.repeat(1, 9, 1, 1)), ("v", v[:, :, 1:]), ("v", v[..., :0]),
            ("v", v.to(torch.complex64)), ("grid", ()), ("grid", (0, 3)), ("grid", "ab"),
            ("grid", (2.5, 2)), ("before", -1), ("before", 1e9), ("after", None), ("keep", 0),
            ("keep", math.nan), ("keep", "x"), ("keep", True), ("scale", math.inf), ("scale", "x"),
            ("draw", 3), ("draw", torch.tensor([64])), ("draw", torch.tensor([0.5])),
            ("leader", torch.tensor([9] * len(q))), ("leader", torch.zeros(len(q) + 1).long()),
            ("attn_mask", torch.ones(length - 1, dtype=torch.bool)), ("attn_mask", [1]),
            ("attn_mask", torch.ones(9, 9, 9, length, dtype=torch.bool)),
            ("attn_mask", torch.ones(length).int()), ("kernel", None), ("kernel", len),
            ("kernel", lambda q, k, v, attn_mask, enable_gqa=0, scale=0: q.tolist()),
            ("fit_queries", -1), ("tile_size", 1), ("seed", None), ("unknown", 1),
        ]
    )  # fmt: skip
    told = f"{name}: {str(value)[:60]!r} ({getattr(value, 'shape', '')})"
    try:
        attention(**{**call, name: value})
    except (ValueError, TypeError) as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if Path(mame_sd.__file__).parent in last.parents and "\n" not in str(error):
            return "held"
        raise AssertionError(f"{told}: {last.name}: {error!r}") from error
    raise AssertionError(f"{told}: taken")


@cache
def finished() -> tuple[Path, list[str]]:
    """Return a folder with a tiny model and a finished run, and the command that made the run."""
    work = Path(tempfile.mkdtemp(prefix="robustness-"))
    atexit.register(subprocess.run, ["rm", "-rf", work])  # shutil.rmtree can't go deep enough
    model = save_tiny_pipeline(work / "model")
    call = ["generate", "--quiet", "--device", "cpu", "--steps", "1"]
    with contextlib.redirect_stdout(io.StringIO()):
        own = ["x", "--model", str(model), "--out", str(work / "run")]
        assert generate([*call, *own]) == 0
    return work, call


def deep(folder: Path, depth: int) -> None:
    """Make folders in one another, also where their path is longer than the system takes."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=inner)
        inner, outer = os.open("a", os.O_RDONLY, dir_fd=inner), inner
        os.close(outer)
    os.close(inner)


def hostile(draw: Draw) -> str:
    work, call = finished()
    place = Path(tempfile.mkdtemp(dir=work))
    run, model = (Path(shutil.copytree(work / name, place / name)) for name in ("run", "model"))
    out, prompts, config = run, ["x"], place / "config.json"
    size = int(10 ** draw.uniform(1, 6.7))
    kind = draw.choice(["deep", "line", "lines", "patterns", "images", "json"])
    if kind == "deep":
        deep(draw.choice([run, run / "images", model, model / "unet"]), draw.randint(1, 2000))
    elif kind in ("line", "lines"):
        text = "x" * size if kind == "line" else "x\n" * size
        (place / "prompts.txt").write_text(text)
        prompts = ["--num", "1", "--prompts", str(place / "prompts.txt")]
        out = place / "new"
    elif kind == "images":
        prompts += ["--images-per-prompt", str(draw.randint(10**7, 10**30))]
    elif kind == "patterns":
        config.write_text(json.dumps({"layers": {f"a{i}*": {"keep": 0.5} for i in range(size)}}))
    else:
        config.write_text(draw.choice(["[", '{"layers":', "9"]) * size)
    settings = ["--config", str(config)] if os.path.lexists(config) else []
    errors = io.StringIO()
    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            status = generate(
                [*call, *prompts, *settings, "--model", str(model), "--out", str(out)]
            )
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        subprocess.run(["rm", "-rf", place], check=True)
    told = errors.getvalue()
    if status == 0:
        return "held"
    lines = [line for line in told.splitlines() if line.startswith("error: ")]
    assert (status, len(lines)) == (2, 1), f"{kind}, {size}: {status}, {told[:300]}"
    assert len(lines[0]) < 3000, f"{kind}, {size}: a line of {len(lines[0])} characters"
    return "refused"


def late(*_: object) -> None:
    raise TimeoutError("a command that takes more than a minute")


KINDS: dict[str, Callable[[Draw], str]] = {"masks": masked, "broken": broken, "files": hostile}

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", KINDS, 200))
