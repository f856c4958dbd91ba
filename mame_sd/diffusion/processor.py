"""Merge by an attention processor, for diffusers' `set_attn_processor`.

    pipe.unet.set_attn_processor(MaMeAttnProcessor(tau=0.8))

The processor runs on every Attention of a model, and merges those calls that can merge. It gets
tokens [B, L, C] without their height and width: give `size` for images that are not square. It
can't tell what the tokens are either: in a video model keep `min_tokens` above the number of
frames. Slicing, `fuse_qkv_projections`, `load_ip_adapter` and PAG replace processors, this one
included. `apply_mame` survives all of these, reads the true size and does not merge attention over
frames.
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor

from mame_sd.config import ConfigOrFile, MaMeConfig, read_config
from mame_sd.diffusion.attention_backends import watch_kernels
from mame_sd.diffusion.families.attention import PlainAttention, fixed_reason
from mame_sd.diffusion.families.processors import default_processor, processed
from mame_sd.diffusion.layer import NO_SIZE, LayerCall, LayerStats, merged_call
from mame_sd.diffusion.report import MaMeReport, make_report
from mame_sd.report import NothingMergedError

_UNCOUNTED = LayerStats("compiled")
_LAYER = PlainAttention()
# Settings that only hooks support, with the reason why a processor can't.
_BY_HOOKS = {
    "references": "sees no reference images",
    "mlp_keep": "sees attention alone",
    "block_keep": "sees attention alone",
    "layers": "does not know the names of layers",
}


class MaMeAttnProcessor:
    """Merge in the self-attention that the processor is installed on.

    With `tau` whole tokens merge before the attention and are restored after it, as in the paper.
    With `keep` keys and values merge.

    Args:
        config: the settings, or a .json file of them. If None, the measured default.
        inner: the processor that computes attention. If None, the one that diffusers installs on
            each module by default.
        fields: fields of MaMeConfig except `references`, `mlp_keep`, `block_keep` and `layers`,
            over those of `config`.

    Raises:
        TypeError: `config` is no MaMeConfig, or `inner` no processor.
        ValueError: a field is unknown, out of its range, or not supported by a processor.
    """

    def __init__(self, config: ConfigOrFile = None, *, inner: Any = None, **fields: Any) -> None:
        self.config = (read_config(config) or MaMeConfig()).replace(**fields)
        for name, reason in _BY_HOOKS.items():
            if (value := getattr(self.config, name)) is not None:
                raise ValueError(
                    f"{name}: expected none, got {value!r}: a processor {reason}; use apply_mame"
                )
        if inner is not None and (isinstance(inner, type) or not callable(inner)):
            raise TypeError(
                f"inner: expected an attention processor, got {inner!r}; give one that was made"
            )
        watch_kernels()
        self.inner = inner
        self._stats: dict[Attention, LayerStats] = {}
        # Number of calls that were no self-attention over tokens, by reason.
        self._passed: Counter[str] = Counter()
        self._warned = False

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        image_rotary_emb: Any = None,
        query_rotary_emb: Any = None,
        key_rotary_emb: Any = None,
        rotary_emb: Any = None,
        base_sequence_length: int | None = None,
        ip_adapter_masks: Any = None,
        ip_hidden_states: Any = None,
    ) -> Tensor:
        """Compute the attention's output [B, L, C] of tokens `hidden_states` [B, L, C].

        The keywords are those that diffusers' processors name: diffusers passes no others. The text
        of a cross-attention is `encoder_hidden_states` [B, N, C'].
        """
        if self.inner is None:
            rotary = image_rotary_emb, query_rotary_emb, key_rotary_emb, rotary_emb
            rotates = any(part is not None for part in rotary)
            _check_replaceable(attn, hidden_states, encoder_hidden_states, rotates)
        inner = default_processor(attn) if self.inner is None else self.inner
        arguments = {
            "hidden_states": hidden_states,
            "encoder_hidden_states": encoder_hidden_states,
            "attention_mask": attention_mask,
            "temb": temb,
            "image_rotary_emb": image_rotary_emb,
            "query_rotary_emb": query_rotary_emb,
            "key_rotary_emb": key_rotary_emb,
            "rotary_emb": rotary_emb,
            "base_sequence_length": base_sequence_length,
            "ip_adapter_masks": ip_adapter_masks,
            "ip_hidden_states": ip_hidden_states,
        }
        compiling = torch.compiler.is_compiling()
        run, kind = partial(processed, inner, attn), type(inner).__name__
        call = LayerCall(attn, run, arguments, processor=inner, kind=kind)
        crossed = encoder_hidden_states is not None or fixed_reason(attn) == "cross-attention"
        if crossed or hidden_states.dim() != 3:
            if not compiling:
                other = f"input of {hidden_states.dim()} dimensions"
                self._passed["cross-attention" if crossed else other] += 1
            return call.run()
        if not compiling and attn not in self._stats:
            name = f"self-attention {len(self._stats)} ({attn.query_dim} channels)"
            self._stats[attn] = LayerStats(name)
        stats = _UNCOUNTED if compiling else self._stats[attn]
        output: Tensor = merged_call(_LAYER, call, None, self.config, stats)
        if NO_SIZE in stats.note and not self._warned and not compiling:
            self._warned = True
            warnings.warn(
                f"{stats.note}, or use apply_mame, which reads it", UserWarning, stacklevel=2
            )
        return output

    def report(self) -> MaMeReport:
        """Report tokens in and kept by self-attention layer since the last `reset`.

        Layers are in the order of their first calls. Calls within `torch.compile` are not counted
        here, but `apply_mame` counts them.

        Raises:
            NothingMergedError: a forward has run and no layer could merge.
        """
        if self._passed and not self._stats:
            calls = ", ".join(f"{reason} ({n} calls)" for reason, n in sorted(self._passed.items()))
            raise NothingMergedError(
                "expected self-attention over tokens [B, L, C], but every call was something else:"
                f" {calls}. Set the processor on a UNet's self-attention, or remove it"
            )
        return make_report(self._stats.values())

    def reset(self) -> None:
        """Drop all counters."""
        self._stats.clear()
        self._passed.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the counters: a copy counts the calls of its own model."""
        return {**self.__dict__, "_stats": {}, "_passed": Counter()}

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Watch kernels, since a model that was saved whole merges without a new processor."""
        self.__dict__.update(values)
        watch_kernels()

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.config.given.items())
        return f"MaMeAttnProcessor({settings})"


def _check_replaceable(
    attn: Any, hidden_states: Tensor, encoder_hidden_states: Any, rotary: bool
) -> None:
    """Raise ValueError if diffusers' default processor can't compute what the replaced one did.

    `encoder_hidden_states` are tokens of the text, or a tuple of text and image states.
    """
    lost = ""
    if isinstance(encoder_hidden_states, tuple):
        lost = "an IP-Adapter's processors (its image states came with the text)"
    elif not isinstance(attn, Attention):
        lost = f"the processor of {type(attn).__name__}, a transformer's attention"
    elif rotary:
        lost = "a processor of rotary positions, as transformers have it"
    elif attn.added_kv_proj_dim is not None and hidden_states.dim() == 3:
        lost = "a processor of joint attention over text and image, as transformers have it"
    if lost:
        raise ValueError(
            "expected the plain attention of a UNet, DiT or PixArt, but set_attn_processor"
            f" replaced {lost}: load the model (or the IP-Adapter) again and use apply_mame, which"
            " replaces nothing"
        )
