"""Why keys picked at random beat averaged ones: what a cell's mean loses, and what a pick only
makes noisy.

    python -m benchmarks.covariance                      # the embedded UNet, 4 prompts
    python -m benchmarks.covariance --model transformer
    # how far first order goes in a layer of random weights:
    python -m benchmarks.covariance --sharpness

To first order in the logits attention is o(q) = mean(v) + Cov(v, k) q / sqrt(d), the covariance
taken over the tokens. Means of cells keep what varies between cells and lose what varies within
them. That is an error of -Cov_within(v, k) q / sqrt(d), the same at every step. One token of each
cell has the whole covariance in expectation: no such bias, but a variance, which new draws average
out.

Printed for self-attention over the image's tokens (2 x 2 cells, `--queries` queries a call; text
keys left out), by noise:

* within: share of Cov(v, k) that lies within cells, <C_within, C> / <C, C>;
* predicted: cosine between the error of means of cells and -C_within q / sqrt(d), over all queries
  and heads;
* error of each form, as it is and with the first-order correction (`correct=True`), |o' - o|^2 / |o
  - mean(v)|^2, split into the bias of its mean over draws and the variance around it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.generation import generate, load
from benchmarks.instruments import INSTRUMENTS
from benchmarks.layers import attention, inputs, ours
from mame_sd import MaMeConfig
from mame_sd.config import Study
from mame_sd.core.correction import first_order, moments
from mame_sd.diffusion.apply_denoiser import denoiser_of

DRAWS = 16
FORMS = (
    "means of cells",
    "first of each cell",
    "random of each cell",
    "random quarter",
    "random sixteenth",
)


def cells(t: Tensor, side: int) -> Tensor:
    """[B, heads, side * side, d] as [B, heads, cells, 4, d]."""
    t = t.unflatten(2, (side // 2, 2, side // 2, 2)).transpose(3, 4)
    return t.flatten(4, 5).flatten(2, 3)


def covariance(v: Tensor, k: Tensor) -> Tensor:
    """[..., d, d] over the last dimension but one, of tokens."""
    v, k = (t - t.mean(-2, keepdim=True) for t in (v, k))
    return v.transpose(-1, -2) @ k / k.shape[-2]


def within(v: Tensor, k: Tensor) -> Tensor:
    """The part of `covariance` that lies within the cells [B, heads, cells, 4, d]."""
    v, k = ((t - t.mean(-2, keepdim=True)).flatten(2, 3) for t in (v, k))
    return v.transpose(-1, -2) @ k / k.shape[-2]


def one_of_each(t: Tensor, place: Tensor) -> Tensor:
    """Of [B, heads, cells, 4, d] the token `place` [cells] of each cell."""
    return t[:, :, torch.arange(t.shape[2]), place]


def measure(q: Tensor, k: Tensor, v: Tensor, side: int, g: torch.Generator) -> dict[str, float]:
    """The figures of one call: q [B, heads, n, d], k and v [B, heads, side * side, d], all
    double.
    """
    whole = F.scaled_dot_product_attention(q, k, v)
    signal = (whole - v.mean(2, keepdim=True)).square().sum()
    k4, v4 = cells(k, side), cells(v, side)
    inside, total = within(v4, k4), covariance(v, k)
    predicted = -q @ inside.transpose(-1, -2) / q.shape[-1] ** 0.5
    error = F.scaled_dot_product_attention(q, k4.mean(3), v4.mean(3)) - whole
    found = {
        "within": ((inside * total).sum() / total.square().sum()).item(),
        "predicted": F.cosine_similarity(error.flatten(), predicted.flatten(), dim=0).item(),
    }
    count = k4.shape[2]

    def kept(form: str) -> list[tuple[Tensor, Tensor]]:
        """Keys and values that stay, for each draw."""
        if form == "means of cells":
            return [(k4.mean(3), v4.mean(3))]
        if form == "first of each cell":
            return [(k4[:, :, :, 0], v4[:, :, :, 0])]
        if form == "random of each cell":
            places = [torch.randint(4, (count,), generator=g) for _ in range(DRAWS)]
            return [(one_of_each(k4, place), one_of_each(v4, place)) for place in places]
        share = count if form == "random quarter" else count // 4
        chosen = [torch.randperm(k.shape[2], generator=g)[:share] for _ in range(DRAWS)]
        return [(k[:, :, rows], v[:, :, rows]) for rows in chosen]

    for form in FORMS:
        pairs = kept(form)
        fewer = torch.stack([F.scaled_dot_product_attention(q, *pair) for pair in pairs])
        parts = [first_order(moments(k, v), moments(*pair)) for pair in pairs]
        scaled = q * q.shape[-1] ** -0.5
        lacking = torch.stack(
            [scaled @ cov.transpose(-1, -2).to(q.dtype) + shift for cov, shift in parts]
        )
        for name, made in ((form, fewer), (f"{form}, corrected", fewer + lacking)):
            variance = made.var(0).sum() if len(made) > 1 else torch.zeros(())
            # the mean of n draws has a share 1 / n of the variance in it, which is no bias
            bias = (made.mean(0) - whole).square().sum() - variance / len(made)
            found |= {
                f"{name}: bias": (bias / signal).item(),
                f"{name}: variance": (variance / signal).item(),
            }
    return found


class Watch(TorchFunctionMode):
    """Measures self-attention calls over at least `least` image tokens while it is on, at the steps
    of `at`.
    """

    def __init__(self, least: int, queries: int, at: Mapping[int, str]) -> None:
        super().__init__()
        self.step, self._at, self._least, self._queries = -1, at, least, queries
        self._generator = torch.Generator().manual_seed(0)
        self.found: dict[str, list[dict[str, float]]] = defaultdict(list)

    def count(self, *_: Any) -> None:
        """A forward pre-hook of the denoiser."""
        self.step += 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.step in self._at:
            q, k, v = (t.double() for t in args[:3])
            if k.shape[2] >= self._least and q.shape[2] == k.shape[2]:
                side = self._side(k.shape[2])
                chosen = torch.randperm(side * side, generator=self._generator)[: self._queries]
                call = q[:, :, chosen], k[:, :, : side * side], v[:, :, : side * side]
                self.found[self._at[self.step]].append(measure(*call, side, self._generator))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _side(tokens: int) -> int:
        """Side of the image among `tokens`: the largest power of two whose square fits."""
        return 2 ** ((tokens.bit_length() - 1) // 2)


def sharpness(tokens: int = 1024, dim: int = 320) -> list[dict[str, float]]:
    """What the default errs by, corrected and not, where a random layer's queries are scaled up:
    |o' - o| / |o| over the logits' spread.
    """
    side, cpu = round(tokens**0.5), torch.device("cpu")
    x = inputs(2, tokens, dim, cpu, torch.float32)()
    rows = []
    for factor in (0.3, 1, 3, 6, 10, 20):
        attn = attention(dim, cpu, torch.float32)
        attn.to_q.weight.mul_(factor)
        q, k = (
            linear(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for linear in (attn.to_q, attn.to_k)
        )
        row = {"logit_std": float((q @ k.transpose(-1, -2) * attn.scale).std())}
        whole = attn(x)
        for name, correct in (("corrected", True), ("not corrected", False)):
            found = ours(attn, MaMeConfig(study=Study(correct=correct)), (side, side))(x)
            row[name] = float((found - whole).norm() / whole.norm())
        rows.append(row)
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=INSTRUMENTS, default="unet", help="embedded model (default unet)"
    )
    parser.add_argument("--num", type=int, default=4, help="prompts (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (default 10)")
    parser.add_argument(
        "--queries", type=int, default=128, help="queries measured of each call (default 128)"
    )
    parser.add_argument(
        "--sharpness", action="store_true", help="of a layer of random weights instead"
    )
    args = parser.parse_args()
    if args.sharpness:
        found = sharpness()
        print("| standard deviation of the logits | corrected | not corrected |\n|---|---|---|")
        for row in found:
            print(
                f"| {row['logit_std']:.2f} | {row['corrected']:.3f} | {row['not corrected']:.3f} |"
            )
        print(json.dumps({"benchmark": "sharpness", "rows": found}))
        return
    on = INSTRUMENTS[args.model]
    model = load(torch.device("cpu"), torch.float32, on.model)
    at = {
        args.steps // 10: "early",
        args.steps // 2: "middle",
        args.steps - 1 - args.steps // 10: "late",
    }
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for seed, prompt in enumerate(on.prompts(args.num)):
        watch = Watch(1024, args.queries, at)
        handle = denoiser_of(model.pipe).register_forward_pre_hook(watch.count)
        with watch:
            generate(model, [prompt], args.steps, seed, output="latent")
        handle.remove()
        for when, found in watch.found.items():
            rows[when] += found
    means = {
        when: {name: sum(row[name] for row in found) / len(found) for name in found[0]}
        for when, found in rows.items()
    }
    print("| | " + " | ".join(means) + " |\n|---|" + "---|" * len(means))
    for name in next(iter(means.values())):
        print(f"| {name} | " + " | ".join(f"{found[name]:.4f}" for found in means.values()) + " |")
    print(
        json.dumps(
            {
                "benchmark": "covariance",
                "model": on.model,
                "num": args.num,
                "steps": args.steps,
                "means": means,
            }
        )
    )


if __name__ == "__main__":
    main()
