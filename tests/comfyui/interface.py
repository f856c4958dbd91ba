"""The part of ComfyUI's interface that the node uses, around real attention.

Written after calls of ComfyUI 0.33.0 (commit 783545f6) and 0.3.64; `test_engine.py` compares it
with the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

Wrapper = Callable[..., Any]


def applied(node: Any, model: Any, **changes: Any) -> Any:
    """Return a clone of the model that merges by these inputs of the node."""
    values = {"mode": "keep", "keep": 0.25, "tau": 0.1, "min_tokens": 16} | changes
    return node.patch(model, **values)[0]


def network(kind: str, **attributes: Any) -> Any:
    """Make a model of the engine's class of that name that only says where its tokens are."""
    module = type(kind, (nn.Module,), {})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class SpatialTransformer(nn.Module):
    """Where a UNet's block has its transformer layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(layers)


class UNetModel(nn.Module):
    """Blocks of a UNet, of which the self-attention at `where` is called as the engine does."""

    middle_block: nn.Module | None

    def __init__(
        self,
        blocks: BasicTransformerBlock | dict[tuple[str, int], BasicTransformerBlock],
        where: tuple[str, int] = ("input", 1),
    ) -> None:
        super().__init__()
        blocks = blocks if isinstance(blocks, dict) else {where: blocks}
        self.where = where
        self.num_res_blocks = [1] * (max(place for _, place in blocks) // 2 + 1)

        def made(name: str) -> nn.ModuleList:
            return nn.ModuleList(
                SpatialTransformer(blocks[name, i]) if (name, i) in blocks else nn.Identity()
                for i in range(2 * len(self.num_res_blocks))
            )

        self.input_blocks, self.output_blocks = made("input"), made("output")
        self.middle_block = made("middle")[0] if ("middle", 0) in blocks else None
        self.attn: Any = blocks[where].attn1

    def forward(self, n: Tensor, size: tuple[int, int], options: dict[str, Any]) -> Tensor:
        """Compute the attention of n [B, h * w, C]."""
        patches, replaced = options.get("patches", {}), options.get("patches_replace", {})
        extra = {k: v for k, v in options.items() if k not in ("patches", "patches_replace")}
        extra |= {"block": self.where, "block_index": 0, "n_heads": self.attn.heads}
        extra |= {"activations_shape": [n.shape[0], n.shape[2], *size]}
        context = value = n
        for patch in patches.get("attn1_patch", []):
            n, context, value = patch(n, context, value, extra)
        q, k, v = self.attn.to_q(n), self.attn.to_k(context), self.attn.to_v(value)
        replace = replaced.get("attn1", {}).get((*self.where, 0))
        n = self.attn.to_out[0](
            self.attend(q, k, v, options) if replace is None else replace(q, k, v, extra)
        )
        for patch in patches.get("attn1_output_patch", []):
            n = patch(n, extra)
        return n

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        named = {"attn_precision": None, "transformer_options": options}
        return optimized_attention(q, k, v, self.attn.heads, **named)


def attention_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Compute attention as the engine's function of that name."""
    if not skip_reshape:
        q, k, v = (
            t.reshape(q.shape[0], -1, heads, q.shape[-1] // heads).transpose(1, 2)
            for t in (q, k, v)
        )
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.dim() == 2 else mask
        mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
    output = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


def optimized_attention(*args: Any, function: Wrapper = attention_pytorch, **kwargs: Any) -> Tensor:
    """Call the override of the options if there is one, or else `function`, as the engine does."""
    override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
    if override is None:
        result: Tensor = function(*args, **kwargs)
    else:
        result = override(function, *args, **kwargs, _inside_attn_wrapper=True)
    return result


class Sampling:
    """Sigmas of a thousand steps: the sigma of timestep t is t / 1000."""

    def timestep(self, sigma: Tensor) -> Tensor:
        return (sigma * 1000).round()

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - percent


@dataclass
class Executor:
    """A chain of wrappers around a call."""

    call: Wrapper
    class_obj: Any
    wrappers: list[Wrapper]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.call(*args, **kwargs)
        first, *rest = self.wrappers
        return first(Executor(self.call, self.class_obj, rest), *args, **kwargs)


class Model:
    """What the engine calls a ModelPatcher, its model, and a sampler's guider, in one."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.wrappers: dict[tuple[str, str], list[Wrapper]] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.model_sampling = Sampling()
        self.object_patches: dict[str, Any] = {}

    def clone(self) -> Model:
        twin = Model(self.network)
        twin.wrappers = {key: list(found) for key, found in self.wrappers.items()}
        options = self.model_options["transformer_options"]
        twin.model_options = {"transformer_options": dict(options)}
        twin.object_patches = dict(self.object_patches)
        return twin

    def add_object_patch(self, name: str, value: Any) -> None:
        self.object_patches[name] = value

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Put the model's object patches in place for a block, as the engine does for a run."""
        places = []
        for name, value in self.object_patches.items():
            path, _, last = name.removeprefix("diffusion_model.").rpartition(".")
            module = self.network.get_submodule(path)
            places.append((module, last, getattr(module, last)))
            setattr(module, last, value)
        try:
            yield
        finally:
            for place in places:
                setattr(*place)

    def get_model_object(self, name: str) -> Any:
        if name in self.object_patches:
            return self.object_patches[name]
        first, *path = name.split(".")
        assert first == "diffusion_model"
        return reduce(getattr, path, self.network)

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Wrapper) -> None:
        self.wrappers.setdefault((kind, key), []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.pop((kind, key), None)

    def _through(self, kind: str, call: Wrapper) -> Executor:
        found = [wrapper for key, own in self.wrappers.items() if key[0] == kind for wrapper in own]
        return Executor(call, self, found)

    def apply_model(
        self, latent: Tensor, sigma: float, call: Callable[[dict[str, Any]], Tensor], **kwargs: Any
    ) -> Any:
        """Call the model; `call` gets the options that arrive there."""
        times, context = torch.full((latent.shape[0],), sigma), kwargs.pop("context", None)
        options = dict(self.model_options["transformer_options"])
        through = self._through("apply_model", lambda *args, **_: call(args[5]))
        return through(latent, times, None, context, None, options, **kwargs)

    def self_attention(self, n: Tensor, size: tuple[int, int], sigma: float = 0.5) -> Tensor:
        """One call whose only layer is this UNet's, on n [B, h * w, C]."""
        latent = torch.zeros(n.shape[0], 4, *size)
        result: Tensor = self.apply_model(
            latent, sigma, lambda options: self.network(n, size, options)
        )
        return result

    def sample(self, call: Wrapper) -> Any:
        """Run the sampler; `call` is called with the model and this run's own options."""
        run = self.clone()
        return run._through("outer_sample", lambda: call(run))()
