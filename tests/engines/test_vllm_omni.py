"""vLLM-Omni's plugin, behind stand-ins for the interface of 0.30.0's diffusion backends."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from enum import Enum
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd import attention

BACKENDS = "vllm_omni.diffusion.attention.backends"
T, H, W, TEXT = 2, 3, 4, 5


class SDPABackend:
    """The engine's backend, as far as ours meets it."""

    @staticmethod
    def get_name() -> str:
        return "SDPA"


class SDPAImpl:
    """Its implementation, [B, L, H, D]."""

    def __init__(
        self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False, **_: Any
    ) -> None:
        self.causal, self.softmax_scale = causal, softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Any:
        return self._forward_impl(query, key, value, attn_metadata)

    def _forward_impl(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any, mode: str = ""
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        mask = getattr(attn_metadata, "attn_mask", None)
        mask = None if mask is None else mask[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.softmax_scale).transpose(
            1, 2
        )


class Backend(Enum):
    TORCH_SDPA = "torch"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its modules, importable; `chosen` is what was registered, `config` the model's."""
    state = SimpleNamespace(config=SimpleNamespace(model_class_name="WanPipeline"), chosen={})
    register = state.chosen.__setitem__
    given = {
        f"{BACKENDS}.sdpa": {"SDPABackend": SDPABackend, "SDPAImpl": SDPAImpl},
        f"{BACKENDS}.registry": {
            "DiffusionAttentionBackendEnum": Backend,
            "register_diffusion_backend": register,
        },
        "vllm_omni.diffusion.config": {
            "get_current_diffusion_config_or_none": lambda: state.config
        },
    }
    for name, values in given.items():
        for parent in itertools.accumulate(name.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        sys.modules[name].__dict__.update(values)
    monkeypatch.delitem(sys.modules, "mame_sd.engines.vllm_omni", raising=False)
    yield state
    sys.modules.pop("mame_sd.engines.vllm_omni", None)


def registered(engine: Any) -> dict[str, str]:
    """Return what replaces which backend after the entry point was called."""
    entry = EntryPoint("mame_sd", "mame_sd.engines.vllm_omni:register", "vllm_omni.general_plugins")
    entry.load()()
    return {key.name: path for key, path in engine.chosen.items()}


def layer(scale: float = 16**-0.5) -> Any:
    """Make an attention layer as the engine makes it from the registered path."""
    module = importlib.import_module("mame_sd.engines.vllm_omni")
    given = {"num_heads": 2, "head_size": 16, "softmax_scale": scale, "causal": False}
    return module.MergedBackend.get_impl_cls()(**given, role="self", backend_explicit=True)


def layout(**values: Any) -> Any:
    plain = {"prefix_len": None, "latent_grid": None, "used_len": None, "video_spans": ()}
    return SimpleNamespace(
        attn_mask=values.pop("mask", None),
        full_attn_spans=None,
        video_layout=SimpleNamespace(**{**plain, **values}),
    )


def span(start: int, grid: tuple[int, int, int], role: str) -> Any:
    return SimpleNamespace(start=start, latent_grid=grid, role=role)


VIDEO = T * H * W
SPANS = span(TEXT, (1, 2, 3), "reference"), span(TEXT + 10, (T, H, W), "target")
LAYOUTS = {
    "Wan": (VIDEO, layout(prefix_len=0, latent_grid=(T, H, W), used_len=VIDEO), 0),
    "padded": (VIDEO + 3, layout(prefix_len=0, latent_grid=(T, H, W), used_len=VIDEO), 0),
    "H3": (TEXT + VIDEO + 3, layout(prefix_len=TEXT, latent_grid=(T, H, W)), TEXT),
    "H3, a reference": (
        TEXT + 10 + VIDEO,
        layout(video_spans=SPANS, used_len=TEXT + 10 + VIDEO),
        TEXT + 10,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_video_merges_where_the_model_says_it_is(
    engine: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MAME_SD_VLLM_OMNI_KEEP", "0.25")
    assert registered(engine) == {"TORCH_SDPA": "mame_sd.engines.vllm_omni.MergedBackend"}
    length, metadata, start = LAYOUTS[name]
    q, k, v = torch.randn(3, 1, length, 2, 16, generator=torch.Generator().manual_seed(0))
    got = layer(0.4).forward(q, k, v, metadata)
    assert got.shape == q.shape
    heads = [t[:, : start + VIDEO].transpose(1, 2) for t in (q, k, v)]
    want = attention(*heads, grid=(T, H, W), before=start, keep=0.25, scale=0.4)
    torch.testing.assert_close(got[:, : start + VIDEO], want.transpose(1, 2))
    text, (key, value) = torch.randn(1, VIDEO, 2, 16), torch.randn(2, 1, TEXT, 2, 16)
    heads = [t.transpose(1, 2) for t in (text, key, value)]
    want = F.scaled_dot_product_attention(*heads, scale=0.4).transpose(1, 2)
    torch.testing.assert_close(layer(0.4).forward(text, key, value, None), want)


def test_what_can_not_act_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registered(engine) == {}  # nobody asked
    for value in ("0", "1.5", "a quarter", "nan"):
        monkeypatch.setenv("MAME_SD_VLLM_OMNI_KEEP", value)
        with pytest.raises(ValueError, match="expected a share above 0 and at most 1, got"):
            registered(engine)
    monkeypatch.setenv("MAME_SD_VLLM_OMNI_KEEP", "0.5")
    merged = layer()
    q, k = torch.randn(1, VIDEO // 2, 2, 16), torch.randn(1, VIDEO, 2, 16)
    with pytest.raises(RuntimeError, match="expected all of a video's queries"):
        merged.forward(q, k, k, LAYOUTS["Wan"][1])
    for name in ("FluxPipeline", "WanS2VPipeline"):
        engine.config = SimpleNamespace(model_class_name=name)
        with pytest.raises(ValueError, match=f"got {name}; unset MAME_SD_VLLM_OMNI_KEEP"):
            layer()
