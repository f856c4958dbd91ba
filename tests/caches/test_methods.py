"""Methods on the caches of one layer, compared with float64 loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mame_sd.caches import (
    METHODS,
    CacheView,
    CausalMaMe,
    EveryKth,
    FutureAttention,
    Kept,
    Selection,
    SnapKV,
)
from mame_sd.caches.fit import with_fitted_values
from mame_sd.caches.merging import _weights, strict_weights
from mame_sd.caches.selection import chosen, gathered
from mame_sd.config import MaMeConfig
from tests.caches import oracle

SCORED = [name for name, method in METHODS.items() if isinstance(method, Selection)]


def view_of(
    tokens: int = 40,
    heads: int = 4,
    groups: int = 2,
    samples: int = 1,
    seed: int = 0,
    **fields: object,
) -> CacheView:
    """A random layer's view, whose rotation turns pairs of features by the position."""
    g = torch.Generator().manual_seed(seed)
    h, d = heads // groups, 8

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.unsqueeze(1).unsqueeze(-1).float() * torch.tensor([1.0, 0.3, 0.1, 0.03])
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    plain = draw(samples, heads, tokens, d)
    slots = torch.arange(tokens)
    values: dict[str, object] = {
        "keys": rotate(draw(samples, h, tokens, d), slots.expand(samples, -1)),
        "values": draw(samples, h, tokens, d),
        "queries": rotate(plain, slots.expand(samples, -1)),
        "plain_queries": plain,
        "hidden_states": draw(samples, tokens, 16),
        "slots": slots.expand(samples, h, tokens),
        "seen": tokens,
        "scale": d**-0.5,
        "pads": torch.zeros(samples, dtype=torch.long),
        "rotate": rotate,
    }
    return CacheView(**{**values, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_that_of_a_loop(softcap: float | None) -> None:
    bias = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(1))
    view = view_of(bias=bias, softcap=softcap)
    found = view.attention(view.queries, view.query_slots)
    for head in range(4):
        for query in (0, 7, 39):
            logits = (
                view.keys[0, head // 2].double()
                @ view.queries[0, head, query].double()
                * view.scale
            )
            if softcap is not None:
                logits = (logits / softcap).tanh() * softcap
            logits = (logits + bias[0, head // 2].double())[: query + 1]
            want = torch.zeros(40, dtype=torch.float64)
            want[: query + 1] = logits.exp() / logits.exp().sum()
            torch.testing.assert_close(
                found[0, head // 2, head % 2, query].double(), want, atol=1e-6, rtol=1e-5
            )


@pytest.mark.parametrize("keep", [0.75, 0.5, 0.25, 0.125])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_what_was_asked_for(name: str, keep: float) -> None:
    method = METHODS[name]
    views = [view_of(48, seed=i, layer=i) for i in range(2)]
    if getattr(method, "all_layers", False):
        kept = method.compress_all(views, keep)  # type: ignore[attr-defined]
    else:
        kept = [method.compress(view, keep) for view in views]
    total = sum(k.slots[0].numel() if k.real is None else int(k.real.sum()) for k in kept)
    assert total == round(48 * keep) * 4
    for one in kept:
        assert one.keys.isfinite().all()
        assert one.values.isfinite().all()
        real = torch.ones_like(one.slots, dtype=torch.bool) if one.real is None else one.real
        for head in range(2):
            slots = one.slots[0, head][real[0, head]].tolist()
            assert len(set(slots)) == len(slots)
            assert 47 in slots


@pytest.mark.parametrize("name", SCORED)
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    if name == "random":
        pytest.skip("draws a number for each slot, padding too")
    short, pads = view_of(40), 9

    def front(t: Tensor, dim: int = 2) -> Tensor:
        shape = list(t.shape)
        shape[dim] = pads
        return torch.cat([torch.full(shape, 3.0), t], dim)

    real = torch.arange(40 + pads) >= pads
    long = replace(
        short,
        **{n: front(getattr(short, n)) for n in ("keys", "values", "queries", "plain_queries")},
        hidden_states=front(short.hidden_states, 1),
        slots=torch.arange(40 + pads).expand(1, 2, -1),
        seen=40 + pads,
        pads=torch.tensor([pads]),
        real=real.expand(1, 2, -1),
    )
    if name in ("every-kth", "chunkkv"):
        pytest.skip("cells and chunks count from the first slot")
    method = METHODS[name]
    want, got = method.compress(short, 0.3), method.compress(long, 0.3)
    same = torch.ones_like(want.slots, dtype=torch.bool) if want.real is None else want.real
    assert got.real is None or torch.equal(got.real, same)
    assert torch.equal((got.slots - pads)[same], want.slots[same])
    if name != "cam":  # whose draws count slots too
        torch.testing.assert_close(got.values[same], want.values[same])


def test_shares_of_heads_and_layers_add_up() -> None:
    views = [
        replace(view_of(64, seed=i, layer=i), values=view_of(64, seed=i).values * (1 + 5 * i))
        for i in range(3)
    ]
    sizes = {}
    for share in ("none", "heads", "layers", "all"):
        kept = Selection(FutureAttention(), share=share).compress_all(views, 0.25)
        sizes[share] = [
            k.slots.shape[2] if k.real is None else k.real.sum(-1)[0].tolist() for k in kept
        ]
    assert sizes["none"] == [16, 16, 16]
    assert all(isinstance(s, int) or sum(s) == 32 for s in sizes["heads"])
    assert all(isinstance(s, int) for s in sizes["layers"])
    assert sizes["layers"][0] < sizes["layers"][2]  # larger values earn more
    assert sum(2 * s if isinstance(s, int) else sum(s) for s in sizes["all"]) == 96


def test_a_loop_picks_the_same_keys() -> None:
    view = view_of(32)
    scores = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(3))
    how = Selection(EveryKth(), sinks=2, recent=3)
    stays = chosen(scores, view, 0.5, how)
    for head in range(2):
        fixed = {0, 1, 29, 30, 31}
        rest = sorted(set(range(32)) - fixed, key=lambda t: -float(scores[0, head, t]))
        assert set(stays[0, head].nonzero()[:, 0].tolist()) == fixed | set(rest[: 16 - len(fixed)])


def test_fit_solves_its_least_squares() -> None:
    view = view_of(40, heads=2, groups=2)
    stays = chosen(
        SnapKV(window=8).score(view.keys, view.values, view.queries, view),
        view,
        0.4,
        Selection(SnapKV()),
    )
    kept, place = gathered(view, stays)
    queries = view.queries
    fit = with_fitted_values(view, kept, place, (queries, torch.ones(1, 40, dtype=torch.bool)))
    assert fit.bias is not None
    flat = queries[0].flatten(0, 1)
    want = oracle.attended(flat, view.keys[0, 0], view.values[0, 0], view.scale)
    before = oracle.attended(flat, kept.keys[0, 0], kept.values[0, 0], view.scale)
    after = oracle.attended(flat, kept.keys[0, 0], fit.values[0, 0], view.scale, fit.bias[0, 0])
    assert (after - want).square().mean() < 0.5 * (before - want).square().mean()
    # The values are the ridge's minimum: its gradient is zero there.
    logits = (flat @ kept.keys[0, 0].T * view.scale + fit.bias[0, 0]).double()
    a = logits.softmax(-1)
    ridge = 0.01 * (a.T @ a).diagonal().mean()
    gradient = (
        a.T @ (a @ fit.values[0, 0].double() - want)
        + ridge * (fit.values - kept.values)[0, 0].double()
    )
    assert gradient.abs().max() < 1e-4


def test_fit_of_all_keys_is_the_cache_itself() -> None:
    view = view_of(24)
    kept, place = gathered(view, torch.ones(1, 2, 24, dtype=torch.bool))
    fit = with_fitted_values(view, kept, place)
    torch.testing.assert_close(fit.values, view.values, atol=1e-4, rtol=1e-4)
    assert fit.bias is not None
    assert fit.bias.abs().max() < 1e-4


@pytest.mark.parametrize("tau", [-0.2, 0.1, 0.3])
def test_causal_weights_are_the_papers(tau: float) -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    weights, stays = _weights(x, MaMeConfig(preset="plain", tau=tau), "mask", None)
    want = oracle.causal_weights(x, tau)
    torch.testing.assert_close(weights.double(), want, atol=2e-5, rtol=1e-4)
    assert torch.equal(stays, want.sum(0) == 0)


def test_strict_weights_are_those_of_a_loop() -> None:
    s = torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        strict_weights(s, 0.3, True).double(), oracle.strict_weights(s, 0.3), atol=1e-5, rtol=1e-4
    )


def test_the_paper_merges_keys_and_values_by_its_weights() -> None:
    view = view_of(30)
    method = CausalMaMe(MaMeConfig(preset="plain", tau=0.1), sinks=0, recent=0)
    kept = method.compress(view, 0.5)
    weights = oracle.causal_weights(view.hidden_states[0], 0.1)
    for i, (key, value) in enumerate(
        zip(
            oracle.merged(view.keys[0].transpose(0, 1), weights),
            oracle.merged(view.values[0].transpose(0, 1), weights),
            strict=True,
        )
    ):
        at = (kept.slots[0, 0] == 2 * i + 1).nonzero()[0, 0]
        torch.testing.assert_close(kept.keys[0, :, at].double(), key, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(kept.values[0, :, at].double(), value, atol=1e-5, rtol=1e-4)


def earlier_change(causal: str) -> float:
    """How far merged destinations before token 24 move when tokens from 24 on are other ones."""
    view = view_of(30)
    method = CausalMaMe(MaMeConfig(preset="plain", tau=0.05), causal=causal, sinks=0, recent=0)
    other = replace(
        view, **{n: getattr(view, n).clone() for n in ("keys", "values", "hidden_states")}
    )
    for part in (other.keys, other.values):
        part[:, :, 24:] += torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(5))
    other.hidden_states[:, 24:] = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(6))
    first, second = (_destinations(method.compress(v, 0.5)) for v in (view, other))
    return max(float((first[s] - second[s]).abs().max()) for s in range(1, 24, 2))


def _destinations(kept: Kept) -> dict[int, Tensor]:
    at = {int(s): i for i, s in enumerate(kept.slots[0, 0])}
    return {s: torch.cat([kept.keys[0, :, i], kept.values[0, :, i]], -1) for s, i in at.items()}


def test_a_later_token_changes_no_earlier_one_where_weights_are_causal() -> None:
    assert earlier_change("strict") == 0
    # To the letter the mask comes after the sums, which run over later destinations too.
    assert earlier_change("mask") > 1e-3
    assert earlier_change("none") > 1e-3


def test_a_masked_source_reaches_no_earlier_destination() -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    for causal in ("mask", "strict"):
        weights, _ = _weights(x, MaMeConfig(preset="plain", tau=-0.5), causal, None)
        assert torch.equal(weights, weights.tril())
        assert weights.tril().count_nonzero() > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["default", "snapkv", "expected-attention", "paper-counted", "nearest"]
)
def test_half_precision_comes_near(name: str, dtype: torch.dtype) -> None:
    view = view_of(40)
    half = replace(
        view,
        **{
            n: getattr(view, n).to(dtype)
            for n in ("keys", "values", "queries", "plain_queries", "hidden_states")
        },
    )
    same = replace(
        view,
        **{
            n: getattr(half, n).float()
            for n in ("keys", "values", "queries", "plain_queries", "hidden_states")
        },
    )
    want, got = METHODS[name].compress(same, 0.5), METHODS[name].compress(half, 0.5)
    assert got.keys.dtype == dtype
    agree = (got.slots == want.slots).float().mean()
    assert agree > 0.9
    if agree == 1:
        torch.testing.assert_close(got.values.float(), want.values, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Selection(object()), "method: expected an object with score"),  # type: ignore[arg-type]
        (lambda: Selection(SnapKV(), dropped="mean"), "dropped: expected one of drop, fit"),
        (lambda: Selection(SnapKV(), share="head"), "share: expected one of none, heads"),
        (lambda: CausalMaMe(causal="yes"), "causal: expected one of mask, strict, none"),
    ],
)
def test_bad_settings_say_what_was_expected(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((TypeError, ValueError), match=message):
        build()


def test_scores_of_another_shape_are_refused() -> None:
    class Short:
        def score(self, keys: Tensor, values: Tensor, queries: Tensor, view: CacheView) -> Tensor:
            return keys[..., :3, 0]

    with pytest.raises(
        ValueError,
        match=r"Short.score: expected a number for each key, \[1, 2, 40\], got \[1, 2, 3\]",
    ):
        Selection(Short()).compress(view_of(), 0.5)
