"""Merged keys reach every attention kernel: whenever it is registered or selected, compiled or not.

Stand-ins for kernels that need a GPU note how many keys they are given.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch as dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from torch import Tensor

from mame_sd import MaMeAttnProcessor, NothingMergedError, apply_mame, remove_mame
from tests.builders.layers import attention, tokens
from tests.builders.tiny import one_level_unet, run_unet
from tests.matrix.transformers import ROWS

MERGING = {"keep": 0.5, "min_tokens": 60}
SEEN: list[int] = []  # how many keys each call of a stand-in was given


@torch.library.custom_op("mame_tests::kernel", mutates_args=())
def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention [B, H, N, D] that no graph and no function mode looks into."""
    SEEN.append(key.shape[2])
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores.softmax(-1) @ value).contiguous()


@kernel.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query)


def sage(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """A backend [B, N, H, D] without a mask."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return kernel(q, k, v).transpose(1, 2)


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Registers the stand-in under a name; the registry is as before in the end."""
    backends, names = dict(Registry._backends), dict(Registry._supported_arg_names)
    active = Registry._active_backend
    monkeypatch.setattr(dispatch, "_CAN_USE_SAGE_ATTN", True)
    monkeypatch.setattr(dispatch, "_CAN_USE_FLASH_ATTN", True)
    SEEN.clear()
    torch._dynamo.reset()
    yield lambda name: Registry.register(AttentionBackendName(name))(sage) and None
    for name, backend in backends.items():
        Registry._backends[name] = backend
    Registry._supported_arg_names.update(names)
    Registry._active_backend = active


def flux() -> tuple[Any, Callable[[Any], Tensor], int]:
    """A tiny Flux, a call of it, and how many keys a layer has."""
    row = next(row for row in ROWS if row.name == "Flux")
    inputs = row.run.args[0]  # type: ignore[attr-defined]

    @torch.no_grad()
    def run(model: Any) -> Tensor:
        output: Tensor = model(**inputs, return_dict=False)[0]
        return output

    return row.build(), run, inputs["hidden_states"].shape[1]


def seen() -> set[int]:
    """How many keys the stand-in was given since the last look."""
    counts = set(SEEN)
    SEEN.clear()
    return counts


def all_and_merged(run: Callable[[], Any], backend: str = "sage") -> int:
    """Keys of an unmerged call under the context manager of a backend."""
    with attention_backend(backend):
        run()
    (count,) = seen()
    return count


COMPILED: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "one graph": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "in place": lambda model: model.compile(backend="eager", fullgraph=True) or model,
    "blocks": lambda model: (
        model.compile_repeated_blocks(backend="eager", fullgraph=True) or model
    ),
}


@pytest.mark.parametrize("how", COMPILED.values(), ids=COMPILED)
@pytest.mark.parametrize("registered", ["before", "after"])
def test_a_backend_that_is_set_gets_merged_keys(
    usable: Callable[[str], None], registered: str, how: Callable[[Any], Any]
) -> None:
    model, run, _ = flux()
    usable("sage")
    whole = all_and_merged(lambda: run(model))
    if registered == "after":
        del Registry._backends[AttentionBackendName("sage")]
    handle = apply_mame(model, **MERGING)
    if registered == "after":
        usable("sage")
    model.set_attention_backend("sage")
    eager = run(model)
    (merged,) = seen()
    assert merged < whole
    called = how(model)
    torch.testing.assert_close(run(called), eager, rtol=1e-4, atol=1e-4)
    assert seen() == {merged}
    assert {layer.reason.split(",")[0] for layer in handle.report().layers} == {"attention by sage"}
    remove_mame(model)
    run(model)
    assert seen() == {whole}


@pytest.mark.parametrize("how", COMPILED.values(), ids=COMPILED)
def test_a_backend_that_is_switched_gets_merged_keys(
    usable: Callable[[str], None], how: Callable[[Any], Any]
) -> None:
    model, run, _ = flux()
    for name in ("sage", "flash"):
        usable(name)
    whole = all_and_merged(lambda: run(model))
    handle = apply_mame(model, **MERGING)
    called = how(model)
    native = run(called)
    for name in ("sage", "flash", "sage"):
        with attention_backend(name):
            run(called)
        assert max(seen()) < whole
        assert any(f"by {name}," in layer.reason for layer in handle.report().layers)
    model.set_attention_backend("flash")
    run(called)
    assert max(seen()) < whole
    model.set_attention_backend("native")
    torch.testing.assert_close(run(called), native)
    assert not seen()


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_merges_by_the_kernel_that_is_set(
    usable: Callable[[str], None], strict: bool
) -> None:
    row = next(row for row in ROWS if row.name == "Flux")
    inputs = {**row.run.args[0], "return_dict": False}  # type: ignore[attr-defined]
    model, run, _ = flux()
    usable("sage")
    whole = all_and_merged(lambda: run(model))
    apply_mame(model, **MERGING)
    model.set_attention_backend("sage")
    expected = run(model)
    (merged,) = seen()
    assert merged < whole
    exported = torch.export.export(model, (), inputs, strict=strict)
    seen()
    torch.testing.assert_close(exported.module()(**inputs)[0], expected)
    assert seen() == {merged}


def replacement(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """As people put SageAttention in the place of PyTorch's function."""
    return kernel(query, key, value)


@pytest.mark.parametrize("how", list(COMPILED.values())[:4], ids=list(COMPILED)[:4])
@pytest.mark.parametrize("order", ["before", "after"])
def test_what_stands_in_for_scaled_dot_product_attention_gets_merged_keys(
    monkeypatch: pytest.MonkeyPatch, how: Callable[[Any], Any], order: str
) -> None:
    torch._dynamo.reset()
    unet = one_level_unet()

    def replace() -> None:
        # Whatever was given for a mask is dropped, as SageAttention does.
        monkeypatch.setattr(
            F,
            "scaled_dot_product_attention",
            lambda q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **more: replacement(
                q, k, v
            ),
        )

    if order == "before":
        replace()
    handle = apply_mame(unet, keep=0.5, min_tokens=40)
    if order == "after":
        replace()
    SEEN.clear()
    expected = run_unet(unet)
    counts = seen()
    torch.testing.assert_close(run_unet(how(unet)), expected, rtol=1e-4, atol=1e-4)
    assert seen() == counts
    assert max(counts) < 64
    assert any("takes no sizes of groups" in layer.reason for layer in handle.report().layers)
    remove_mame(unet)
    run_unet(unet)
    assert max(seen()) == 64
