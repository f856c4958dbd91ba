"""Find the attention layers of a transformers model, and compute their queries as they do."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mame_sd import compat

IMPLEMENTATIONS = ("sdpa", "eager")
_NEAR = 1e-2  # relative difference allowed on trial, which covers 16-bit kernels


@dataclass(frozen=True)
class Attention:
    """One attention layer of a decoder: how it makes queries and rotates them."""

    module: Any
    rotary: Any  # None if the layer rotates nothing
    index: int
    sliding: bool  # attends to a window only, so that its cache is short anyway

    def project(self, hidden_states: Tensor, which: str = "q") -> Tensor:
        """Compute queries ("q") or keys ("k") of the layer's input [B, N, C], not rotated.

        Returns:
            [B, H, N, D].
        """
        b, n = hidden_states.shape[:2]
        x = getattr(self.module, f"{which}_proj")(hidden_states)
        norm = getattr(self.module, f"{which}_norm", None)
        weight = getattr(norm, "weight", None)
        flat = weight is not None and weight.shape == x.shape[-1:]
        if norm is not None and flat:  # OLMo 2 norms all heads at once
            x = norm(x)
        x = x.view(b, n, -1, self.module.head_dim)
        if which == "q":  # in Qwen3-Next the gates of the output follow each head
            x = x[:, :, :: x.shape[2] // self.module.config.num_attention_heads]
        if norm is not None and not flat:
            x = norm(x)
        return x.transpose(1, 2)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [B, H, N, D] to positions [B, N] by the model's own functions."""
        if self.rotary is None:
            return x
        cos, sin = self._turn(x, positions)
        turned = cos.shape[-1]  # features that rotate; Phi and StableLM rotate a part only
        apply = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        part = x[..., :turned]
        # The function takes queries and keys; one head of keys is enough.
        part = apply(part, part[:, :1], cos, sin)[0]
        return part if turned == x.shape[-1] else torch.cat([part, x[..., turned:]], -1)

    def _turn(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return cosine and sine of positions [B, N] in the dtype and on the device of x.

        This bypasses the decorator of the rotary embedding's forward, because the decorator changes
        the model if frequencies depend on the length (dynamic NTK, longrope).
        """
        forward = inspect.unwrap(type(self.rotary).forward)
        device = next((b.device for b in self.rotary.buffers()), x.device)
        types = getattr(self.module.config, "layer_types", None)
        takes = "layer_type" in inspect.signature(forward).parameters
        kind = (types[self.index],) if takes and types else ()
        turn = forward(self.rotary, x[:1].to(device), positions.to(device), *kind)
        return tuple(t.to(x) for t in turn)

    @torch.no_grad()
    def checked(self) -> Attention:
        """Return this layer, without rotation if it has none, after a trial on three tokens.

        The trial compares the keys that the layer gives its cache and the queries that it attends
        by with those that this class computes, and checks that the layer adds masks of numbers to
        its logits. If not, it raises ValueError.
        """
        keys: list[Tensor] = []
        queries, places = _Queries(), torch.tensor([[0, 3, 11]], device="cpu")
        why, cause = "its keys are other ones", None

        def update(key: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            keys.append(key)
            return key, values

        try:
            weight = next(self.module.k_proj.parameters())
            width = self.module.config.hidden_size
            dtype = weight.dtype if weight.dtype.is_floating_point else torch.get_default_dtype()
            device = "cpu" if weight.device.type == "meta" else weight.device
            hidden = torch.arange(3 * width, device=device).float().mul(0.7).sin()
            hidden, places = hidden.view(1, 3, width).to(dtype), places.to(device)

            def run(mask: Tensor | None) -> Tensor:
                output = self.module.forward(
                    hidden_states=hidden,
                    position_embeddings=self._turn(hidden, places),
                    attention_mask=mask,
                    **compat.with_cache(self.module, SimpleNamespace(update=update)),
                )
                first: Tensor = output[0] if isinstance(output, tuple) else output
                return first[:, -1]

            with queries:
                run(None)
            for layer in (self, replace(self, rotary=None)):
                if not _near(layer.rotate(layer.project(hidden, "k"), places), keys[0]):
                    continue
                computed = layer.rotate(layer.project(hidden), places)
                if queries.first is not None and not _near(computed, queries.first):
                    why = "its queries are other ones"
                elif not _adds_masks(run, self.module.config.num_attention_heads, hidden):
                    why = "it doesn't add the numbers of a mask to its logits"
                else:
                    return layer
        except Exception as error:
            why, cause = f"it raised {type(error).__name__}", error
        raise ValueError(
            f"model: unknown attention {type(self.module).__name__}; expected one that projects,"
            " norms and rotates keys as Llama, Qwen, Mistral or Gemma do, but on a trial of three"
            f" tokens {why}"
        ) from cause


def _adds_masks(run: Callable[[Tensor], Tensor], heads: int, hidden: Tensor) -> bool:
    """Return True if attention adds a mask of numbers to its logits, as biases of keys need.

    `run` returns the last token's output [1, C] under a mask [1, `heads`, 3, 3].
    """

    def under(*numbers: float) -> Tensor:
        return run(hidden.new_tensor(numbers).expand(1, heads, 3, 3))

    none = torch.finfo(hidden.dtype).min
    first, last = under(0, none, none), under(none, none, 0)
    ignored = torch.equal(first, last) and bool(first.any())
    return not ignored and all(
        _near(output, wanted)
        for output, wanted in (
            (under(-5, -5, -5), under(0, 0, 0)),  # the same number for all keys changes nothing
            (under(-1e4, 1, 1), under(none, 0, 0)),
            (under(1e4, 0, 0), first),
        )
    )


class _Queries(TorchFunctionMode):
    """Remember the queries [B, H, N, D] of the first attention call inside the `with` block."""

    first: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attends = func in (F.scaled_dot_product_attention, torch.matmul)
        if attends and self.first is None and args and args[0].dim() == 4:
            self.first = args[0]
        return func(*args, **(kwargs or {}))


def _near(computed: Tensor, wanted: Tensor) -> bool:
    if computed.shape != wanted.shape:
        return False
    return bool((computed - wanted).float().norm() <= _NEAR * wanted.float().norm())


def attention_layers(model: nn.Module) -> list[Attention]:
    """Find the self-attention layers of a decoder in order, or raise an error if one is unknown."""
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise TypeError(
            f"model: expected a causal language model of transformers, got {type(model).__name__}"
        )
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model: expected a decoder, got {name}, whose cache also holds an encoder's keys"
        )
    modules = {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__
    }
    if not modules:
        raise ValueError(
            "model: expected a decoder with a KV cache, found no attention layer that has one in"
            f" {name}"
        )
    return [_layer(model, path, module) for path, module in modules.items()]


def _layer(model: nn.Module, path: str, module: Any) -> Attention:
    config, name = getattr(module, "config", model.config), type(model).__name__
    used = getattr(config, compat.IMPLEMENTATION, None)
    if used not in IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation: expected {' or '.join(IMPLEMENTATIONS)}, whose masks can weigh"
            f" keys, got {used!r}"
        )
    if "mrope_section" in (getattr(config, "rope_parameters", None) or {}):
        raise ValueError(
            f"model: expected positions of one axis, got {name}, whose images have three; leave"
            " compress_cache out"
        )
    if getattr(module, "sinks", None) is not None:
        raise ValueError(f"model: expected attention without learned sinks, got {name}")
    parts = path.split(".")
    around = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]
    if any(map(compat.is_compiled, around)):
        raise ValueError(
            f"model: expected one that isn't compiled, got a compiled {name}, whose graphs may lack"
            " what shortens its cache; give the model without torch.compile"
        )
    nearby = (child for outer in around for child in outer.children())  # the nearest first
    rotary = next((m for m in nearby if type(m).__name__.endswith("RotaryEmbedding")), None)
    if rotary is None:
        raise ValueError(
            f"model: expected a rotary embedding next to {type(module).__name__}, found none"
        )
    layer = Attention(module, rotary, module.layer_idx, _is_sliding(config, module.layer_idx))
    return layer if layer.sliding else layer.checked()


def _is_sliding(config: Any, index: int) -> bool:
    types = getattr(config, "layer_types", None)
    if types:
        return "sliding" in types[index] or "chunked" in types[index]
    return getattr(config, "sliding_window", None) is not None and getattr(
        config, "use_sliding_window", True
    )
