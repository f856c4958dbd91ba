"""How much of what varies within groups of merged tokens comes back when they are restored, layer
by layer.

    python -m benchmarks.restoring                                # the embedded UNet, half kept
    python -m benchmarks.restoring --model transformer --keep 0.25

This is of the unmerged model's run. The output of every self-attention of 1,024 tokens or more is
merged and restored. It is restored as copies, with what their blur says, and with what follows the
inputs too (`mame_sd.core.detail`). Errors are shares of what copies lose; the merging itself, of
queries and keys, costs more and is not looked at here (`python -m benchmarks.frontier`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.generation import generate, load
from benchmarks.instruments import INSTRUMENTS
from mame_sd import MaMeConfig, plan_merge
from mame_sd.core.detail import Detail, blurred
from mame_sd.diffusion.apply_denoiser import denoiser_of

FEWEST = 1024
HOW = ("copies", "blur", "blur and inputs")


def squared_errors(x: Tensor, output: Tensor, keep: float) -> dict[str, float]:
    """Of the tokens' output [B, L, C], merged and restored by the plan that their inputs x [B, L,
    d] give, in a square.
    """
    side = math.isqrt(x.shape[1])
    plan = plan_merge(x, MaMeConfig(keep=keep, merge="qkv"), (side, side))
    merged = plan.merge(output)
    copies = plan.restore(merged)
    blur = blurred(copies, (side, side))
    within = plan.restore(merged, Detail(x, (side, side)))
    restored = (copies, copies + blur - plan.restore(plan.merge(blur)), within)
    return {how: float((t - output).square().sum()) for how, t in zip(HOW, restored, strict=True)}


def measured(model: str, keep: float, steps: int) -> dict[str, dict[str, float]]:
    """Of each layer of an embedded model the squared errors, summed over the steps of two
    prompts.
    """
    on = INSTRUMENTS[model]
    dtype = torch.bfloat16 if model == "transformer" else torch.float32
    loaded = load(torch.device("cpu"), dtype, on.model)
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(HOW, 0.0))

    def seen(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        cross = isinstance(output, Tensor) and kwargs.get("encoder_hidden_states") is not None
        if x.shape[1] < FEWEST or cross:
            return
        own = output if isinstance(output, Tensor) else output[0]
        for how, error in squared_errors(x.float(), own.float(), keep).items():
            found[name][how] += error

    def hook(name: str) -> Any:
        return lambda module, args, kwargs, output: seen(name, args, kwargs, output)

    denoiser: nn.Module = denoiser_of(loaded.pipe)
    for name, module in denoiser.named_modules():
        if name.endswith(("attn", "attn1")):
            module.register_forward_hook(hook(name), with_kwargs=True)
    generate(loaded, on.prompts(2, False), steps, 0, output="latent")
    return dict(found)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=INSTRUMENTS, default="unet", help="embedded model (default unet)"
    )
    parser.add_argument(
        "--keep", type=float, default=0.5, help="share of tokens that stay (default 0.5)"
    )
    parser.add_argument("--steps", type=int, default=6, help="denoising steps (default 6)")
    args = parser.parse_args()
    found = measured(args.model, args.keep, args.steps)
    found["all"] = {how: sum(errors[how] for errors in found.values()) for how in HOW}
    print("| layer | " + " | ".join(HOW) + " |\n|---|---|---|---|")
    for name, errors in found.items():
        print(
            f"| {name} | " + " | ".join(f"{errors[how] / errors[HOW[0]]:.2f}" for how in HOW) + " |"
        )
    print(json.dumps({"benchmark": "restoring", **vars(args), "squared_errors": found}))


if __name__ == "__main__":
    main()
