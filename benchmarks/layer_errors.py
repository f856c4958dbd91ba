"""Where merging keys errs: one layer, tokens that are made to refute it.

    python -m benchmarks.layer_errors            # every case; minutes, half of them for the video
    python -m benchmarks.layer_errors --only local

Tokens of an image (a video) vary smoothly in space (and time), and a tenth of their variance is
noise of their own. Keys and values are random projections of them. Four kinds of cases, each with
the standard deviation of a query's logits as its sharpness:

* smooth: queries are another projection of the tokens, without relation to their keys;
* local: a token's query is its own key, so that it looks at those like it;
* white: tokens are noise alone, so nothing is alike and nothing should merge;
* text: the error of queries of other tokens, beside the image's that values are fitted to.

Cells are errors of the output relative to how much outputs of queries differ from their mean: 0 is
exact, and a layer that gives every query the mean output has 1. *largest weight* is the weight that
a query gives its first key, the mean of queries.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd import attention
from mame_sd.core.fit import fit_values
from mame_sd.eval.tables import markdown_table

NOISE = 0.1  # share of each token's variance that is its own
SCALE = 8  # tokens along a side over which a smooth field varies


@dataclass(frozen=True)
class Case:
    """One layer: sides of the grid, heads, channels of a head, kind of queries, sharpness."""

    size: tuple[int, ...]
    queries: str
    sharpness: float
    keep: float = 0.25
    heads: int = 4
    width: int = 64
    text: int = 0


_IMAGE, _VIDEO = (32, 32), (13, 30, 44)
CASES = {
    **{
        f"{kind} {sharpness:g}": Case(_IMAGE, kind, sharpness)
        for kind in ("smooth", "local", "white")
        for sharpness in (1.0, 3.0, 10.0)
    },
    "text 3": Case(_IMAGE, "text", 3.0, text=256),
    "more queries than keys": Case(_IMAGE, "local", 3.0, keep=1 / 32),
    "video, smooth 3": Case(_VIDEO, "smooth", 3.0, heads=1, width=128),
    "video, local 3": Case(_VIDEO, "local", 3.0, heads=1, width=128),
    "video, local 10": Case(_VIDEO, "local", 10.0, heads=1, width=128),
}


def tokens(case: Case, generator: torch.Generator) -> Tensor:
    """Tokens [N, channels] of unit variance."""
    made = partial(torch.randn, generator=generator)
    channels = 4 * case.width
    own = made(math.prod(case.size), channels)
    if case.queries == "white":
        return own
    coarse = made(1, channels, *(math.ceil(side / SCALE) + 1 for side in case.size))
    mode = "bilinear" if len(case.size) == 2 else "trilinear"
    field = F.interpolate(coarse, case.size, mode=mode, align_corners=True)[0].flatten(1).T
    field = field / field.std()
    return math.sqrt(1 - NOISE) * field + math.sqrt(NOISE) * own


def layer(case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, H, N, D], text behind the image's tokens."""
    generator = torch.Generator().manual_seed(seed)
    image = tokens(case, generator)
    text = torch.randn(case.text, image.shape[1], generator=generator)

    def view(of: Tensor) -> Tensor:  # by a random projection for each head
        by = torch.randn(case.heads, image.shape[1], case.width, generator=generator)
        return torch.einsum("nc,hcd->hnd", of, by / math.sqrt(image.shape[1])).unsqueeze(0)

    k, v = (torch.cat(parts, 2) for parts in ((view(image), view(text)), (view(image), view(text))))
    q = k if case.queries == "local" else torch.cat([view(image), view(text)], 2)
    return q * (case.sharpness / logits(q, k).std(-1).mean()), k, v


def logits(q: Tensor, k: Tensor) -> Tensor:
    """Those of about 256 of the queries."""
    return q[:, :, :: max(1, q.shape[2] // 256)] @ k.transpose(2, 3) / math.sqrt(q.shape[3])


def random_keys(q: Tensor, k: Tensor, v: Tensor, case: Case, fitted: bool, seed: int) -> Tensor:
    """A share of the image's keys drawn at random, as they are or with fitted values."""
    count = math.prod(case.size)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(count, generator=generator)[: round(case.keep * count)]
    at = torch.cat([drawn, torch.arange(count, k.shape[2])])
    key, value = k[:, :, at], v[:, :, at]
    if fitted:
        queries = min(max(count // 32, 64), 256)
        some = torch.randperm(count, generator=generator)[:queries]
        value = fit_values(q[:, :, some], (k, v), (key, value), None, None, None, (0, len(drawn)))
    return F.scaled_dot_product_attention(q, key, value)


def error(found: Tensor, exact: Tensor) -> float:
    """The relative error, as a share of what differs from the mean output."""
    spread = exact - exact.mean(2, keepdim=True)
    return float((found - exact).norm() / spread.norm())


@torch.no_grad()
def row(case: Case, seeds: int) -> dict[str, float]:
    """Errors of every method, means over draws, and the largest weight of a query (mean)."""
    found: dict[str, float] = {}
    for seed in range(seeds):
        q, k, v = layer(case, seed)
        exact = F.scaled_dot_product_attention(q, k, v)
        ours = partial(attention, q, k, v, case.size, after=case.text, keep=case.keep, seed=seed)
        methods: dict[str, Callable[[], Tensor]] = {
            "merged, fitted": ours,
            "not fitted": partial(ours, fit_queries=0),
            "random, fitted": partial(random_keys, q, k, v, case, True, seed),
            "random": partial(random_keys, q, k, v, case, False, seed),
        }
        looked = slice(math.prod(case.size), None) if case.queries == "text" else slice(None)
        numbers = {
            name: error(make()[:, :, looked], exact[:, :, looked]) for name, make in methods.items()
        }
        numbers["largest weight"] = float(logits(q, k).softmax(-1).amax(-1).mean())
        for name, number in numbers.items():
            found[name] = found.get(name, 0.0) + number / seeds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of cases that begin with this")
    parser.add_argument("--draws", type=int, default=4, help="of tokens (default 4)")
    args = parser.parse_args()
    wanted = {name: case for name, case in CASES.items() if name.startswith(args.only or "")}
    if not wanted or args.draws < 1:
        parser.error(f"expected --draws of at least 1 and a case of {', '.join(CASES)}")
    rows = {name: row(case, args.draws) for name, case in wanted.items()}
    heads = list(next(iter(rows.values())))
    cells = [[name, *(f"{one[head]:.3f}" for head in heads)] for name, one in rows.items()]
    print(markdown_table(["case", *heads], cells))


if __name__ == "__main__":
    main()
