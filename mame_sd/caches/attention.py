"""What is read off a transformers model: its attention layers, their queries, and its rotary
positions.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd import upstream

IMPLEMENTATIONS = ("sdpa", "eager")
_PARTS = ("layer_idx", "q_proj", "k_proj", "v_proj", "head_dim", "config")
_NEAR = 1e-2  # of the norm: how far keys may be from the model's own, for 16-bit kernels


@dataclass(frozen=True)
class Attention:
    """One attention layer of a decoder: how it makes queries and rotates them."""

    module: Any
    rotary: Any  # None: the layer rotates nothing
    index: int
    sliding: bool  # sees a window alone, whose cache is short as it is

    def project(self, hidden_states: Tensor) -> Tensor:
        """Queries [B, H, N, D] before the rotation, of the layer's input [B, N, C]."""
        return self._heads("q", hidden_states)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, N, D] at positions [B, N], by the model's own functions."""
        if self.rotary is None:
            return x
        cos, sin = self._turn(x, positions)
        turned = cos.shape[-1]  # of the features; Phi and StableLM leave others as they are
        apply = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        part = x[..., :turned]
        part = apply(part, part[:, :1], cos, sin)[0]  # queries and keys: of keys one head will do
        return part if turned == x.shape[-1] else torch.cat([part, x[..., turned:]], -1)

    def _turn(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Cosine and sine of positions [B, N], as x has them.

        The rotary embedding's forward is called without what transformers wraps around it, which
        changes the model where frequencies depend on the length (dynamic NTK, longrope).
        """
        forward = inspect.unwrap(type(self.rotary).forward)
        device = next((b.device for b in self.rotary.buffers()), x.device)
        types = getattr(self.module.config, "layer_types", None)
        takes = "layer_type" in inspect.signature(forward).parameters
        kind = (types[self.index],) if takes and types else ()
        turn = forward(self.rotary, x[:1].to(device), positions.to(device), *kind)
        return tuple(t.to(x) for t in turn)

    def _heads(self, which: str, hidden_states: Tensor) -> Tensor:
        b, n = hidden_states.shape[:2]
        x = getattr(self.module, f"{which}_proj")(hidden_states)
        norm = getattr(self.module, f"{which}_norm", None)
        weight = getattr(norm, "weight", None)
        flat = weight is not None and weight.shape == x.shape[-1:]
        if norm is not None and flat:  # over all heads at once, as OLMo 2 does
            x = norm(x)
        x = x.view(b, n, -1, self.module.head_dim)
        if norm is not None and not flat:
            x = norm(x)
        return x.transpose(1, 2)

    @torch.no_grad()
    def checked(self) -> Attention:
        """This layer, with no rotation where it has none.

        The layer is run on three tokens, and the keys that it hands to its cache are compared with
        those that this class makes.

        Raises:
            ValueError: they differ.
        """
        weight = next(self.module.k_proj.parameters())
        width = self.module.config.hidden_size
        dtype = weight.dtype if weight.dtype.is_floating_point else torch.get_default_dtype()
        device = "cpu" if weight.device.type == "meta" else weight.device
        hidden = torch.arange(3 * width, device=device).float().mul(0.7).sin().view(1, 3, width)
        hidden = hidden.to(dtype)
        places = torch.tensor([[0, 3, 11]], device=device)
        probe, name = _Probe(), upstream.cache_argument(self.module.forward)
        try:
            self.module.forward(
                hidden_states=hidden,
                position_embeddings=self._turn(hidden, places),
                attention_mask=None,
                **{name or upstream.CACHE_NAMES[0]: probe},
            )
            assert probe.keys is not None
            plain = self._heads("k", hidden)
            for rotary in (self.rotary, None):
                layer = Attention(self.module, rotary, self.index, self.sliding)
                gap = (layer.rotate(plain, places) - probe.keys).float().norm()
                if gap <= _NEAR * probe.keys.float().norm():
                    return layer
        except Exception as error:
            raise ValueError(self._unknown(f"it raised {type(error).__name__}")) from error
        raise ValueError(self._unknown("its keys are other ones"))

    def _unknown(self, why: str) -> str:
        return (
            f"model: unknown attention {type(self.module).__name__}; expected one that projects,"
            " norms and rotates keys as Llama, Qwen, Mistral or Gemma do, but on a trial of three"
            f" tokens {why}"
        )


class _Probe:
    """Stands in for a cache: keeps the keys of one layer's forward."""

    keys: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Remembers the keys, and gives back what came."""
        self.keys = keys
        return keys, values


def attention_layers(model: nn.Module) -> list[Attention]:
    """Find the self-attention layers of a decoder that can be compressed, in order.

    Raises:
        TypeError: no transformers model.
        ValueError: no layer with a KV cache, an attention that isn't known, or an implementation
            that takes no mask.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise TypeError(
            f"model: expected a causal language model of transformers, got {type(model).__name__}"
        )
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model: expected a decoder alone, got {name}, whose cache holds an encoder's keys too"
        )
    found = {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__
    }
    unknown = {type(module).__name__ for module in found.values() if not _known(module)}
    if unknown:
        raise ValueError(
            f"model: unknown attention {', '.join(sorted(unknown))} in {name}; expected q_proj,"
            " k_proj, v_proj and rotary positions, as in Llama, Qwen, Mistral and Gemma"
        )
    if not found:
        raise ValueError(
            "model: expected a decoder with a KV cache, found no attention layer that has one in"
            f" {name}"
        )
    return [_layer(model, path, module) for path, module in found.items()]


def _layer(model: nn.Module, path: str, module: Any) -> Attention:
    config, name = module.config, type(model).__name__
    used = upstream.implementation_of(config)
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
    around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1))
    beside = (child for outer in around for child in outer.children())  # the nearest first
    rotary = next((m for m in beside if type(m).__name__.endswith("RotaryEmbedding")), None)
    if rotary is None:
        raise ValueError(
            f"model: expected a rotary embedding beside {type(module).__name__}, found none"
        )
    layer = Attention(module, rotary, module.layer_idx, _is_sliding(module))
    return layer if layer.sliding else layer.checked()


def _known(module: Any) -> bool:
    file = sys.modules[type(module).__module__]
    return all(hasattr(module, n) for n in _PARTS) and hasattr(file, "apply_rotary_pos_emb")


def _is_sliding(module: Any) -> bool:
    config, types = module.config, getattr(module.config, "layer_types", None)
    if types:
        return "sliding" in types[module.layer_idx] or "chunked" in types[module.layer_idx]
    return getattr(config, "sliding_window", None) is not None and getattr(
        config, "use_sliding_window", True
    )
