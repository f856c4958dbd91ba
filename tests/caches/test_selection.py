"""The default's scores, lengths and fitted values, compared with float64 loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd.caches import CacheView, Kept, Selection
from mame_sd.caches.layer import CompressedLayer
from mame_sd.caches.selection import (
    AHEAD,
    COUNT,
    future_attention,
    gather_keys,
    token_bytes,
    with_fitted_values,
    with_fixed_keys,
)
from mame_sd.core.fit import solve_ridge
from tests.caches.views import view_of, with_padding
from tests.oracle import attend


def shortened(views: list[CacheView], keep: float, method: Selection | None = None) -> list[Kept]:
    """Apply a selection to all layers."""
    how = method or Selection()
    scored = [how.score_layer(view, keep) for view in views]
    lengths = how.lengths(views, scored, keep)
    return [how.shorten(*part) for part in zip(views, scored, lengths, strict=True)]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_that_of_a_loop(softcap: float | None) -> None:
    bias = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(1))
    view = view_of(bias=bias, softcap=softcap)
    queries, slots = view.newest_queries()
    found = view.attention(queries, slots)
    for head in range(4):
        for query in (0, 7, 39):
            logits = view.keys[0, head // 2].double() @ queries[0, head, query].double()
            logits = logits * view.scale
            if softcap is not None:
                logits = (logits / softcap).tanh() * softcap
            want = (logits + bias[0, head // 2].double())[: query + 1].softmax(0)
            got = found[0, head // 2, head % 2, query].double()
            assert not got[query + 1 :].any()
            torch.testing.assert_close(got[: query + 1], want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("keep", [0.75, 0.125])
def test_the_share_is_one_of_bytes(keep: float) -> None:
    views = [
        replace(view_of(128, seed=i, layer=i), values=view_of(128, seed=i).values * (1 + 2 * i))
        for i in range(3)
    ]
    kept = shortened(views, keep)
    whole = sum(token_bytes(view) * 128 for view in views)
    held = sum(CompressedLayer(one, 128).nbytes for one in kept)
    assert keep * whole - token_bytes(views[0]) * 2 < held <= keep * whole
    counts = [one.keys.shape[2] for one in kept]
    assert keep == 0.75 or counts[0] < counts[2]  # larger values earn more
    for one in kept:
        assert one.real is None
        assert one.values.isfinite().all()
        for head in range(2):
            slots = one.slots[0, head].tolist()
            assert slots == sorted(set(slots))
            assert 127 in slots


@pytest.mark.parametrize("tokens", [1, 3, 14])
def test_a_few_tokens_leave_at_least_one(tokens: int) -> None:
    views = [view_of(tokens, seed=i, samples=2, layer=i) for i in range(2)]
    for one in shortened(views, 0.9) + shortened(views, 0.01):
        assert 1 <= one.keys.shape[2] <= tokens
        assert one.values.isfinite().all()


@pytest.mark.parametrize("sharp", [1, 15])  # sharp attention asks for values out of range
@pytest.mark.parametrize(("left", "right", "tokens"), [(9, 0, 40), (0, 9, 40), (4, 7, 3)])
def test_padding_changes_nothing(left: int, right: int, tokens: int, sharp: int) -> None:
    short = view_of(tokens)
    short = replace(short, keys=sharp * short.keys)
    long = with_padding(short, left, right)
    want, got = shortened([short], 0.4)[0], shortened([long], 0.4)[0]
    assert torch.equal(got.slots - left, want.slots)
    torch.testing.assert_close(got.values, want.values, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.bias, want.bias, atol=1e-5, rtol=1e-4)


def test_a_loop_picks_the_same_keys() -> None:
    view = view_of(32)
    scores = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(3))
    kept, _ = gather_keys(view, with_fixed_keys(scores, view, 0.75), torch.tensor([20]))
    for head in range(2):  # 20 keys: 4 first and 10 newest stay
        fixed = {*range(4), *range(22, 32)}
        rest = sorted(set(range(32)) - fixed, key=lambda t: -float(scores[0, head, t]))
        assert set(kept.slots[0, head].tolist()) == fixed | set(rest[:6])


def test_scores_that_are_no_numbers_rank_last() -> None:
    view = view_of(32)
    scores = torch.arange(32.0).expand(1, 2, 32).clone()
    scores[:, :, 8:12] = torch.nan
    scores[:, :, 14] = torch.inf
    kept, _ = gather_keys(view, with_fixed_keys(scores, view, 0.5), torch.tensor([28]))
    assert {8, 9, 10, 11}.isdisjoint(kept.slots[0, 0].tolist())


def fitted(view: CacheView, count: int) -> tuple[Kept, Kept, Tensor]:
    """Keys that stay, the same with fitted values, and the queries they were fitted to."""
    queries, _ = view.newest_queries()
    scores = future_attention(view, *view.future_queries(1024, 128))
    kept, place = gather_keys(view, with_fixed_keys(scores, view, 0.4), torch.tensor([count]))
    counted = torch.ones(1, queries.shape[2], dtype=torch.bool)
    return kept, with_fitted_values(view, kept, place, queries, counted), queries


def test_fit_solves_its_least_squares() -> None:
    view = view_of(40)
    kept, fit, queries = fitted(view, 16)
    assert fit.bias is not None
    for head in range(2):
        flat, bias = queries[0, 2 * head : 2 * head + 2].flatten(0, 1), fit.bias[0, head]
        keys, old, new = kept.keys[0, head], kept.values[0, head], fit.values[0, head]
        own, values = view.keys[0, head], view.values[0, head]
        want, before, after = (
            attend(*(t.double() for t in (flat, *of)), view.scale, added)[0]
            for *of, added in ((own, values, None), (keys, old, None), (keys, new, bias.double()))
        )
        assert (after - want).square().mean() < 0.5 * (before - want).square().mean()
        # The values are the ridge's minimum: its gradient is zero there.
        a = (flat @ keys.T * view.scale + bias).double().softmax(-1)
        ridge = 0.01 * (a.T @ a).diagonal().mean()
        gradient = a.T @ (a @ new.double() - want) + ridge * (new - old).double()
        assert gradient.abs().max() < 1e-4


@pytest.mark.parametrize(("rows", "columns"), [(5, 9), (9, 5), (1, 1)])
def test_both_forms_of_the_ridge_are_its_minimum(rows: int, columns: int) -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.randn(2, rows, columns, generator=g)
    b = torch.randn(2, rows, 3, generator=g)
    x = solve_ridge(a, b, 0.01, torch.full((2,), columns)).double()
    gram = a.double().mT @ a.double()
    lift = 0.01 * gram.diagonal(dim1=-2, dim2=-1).mean(-1).view(2, 1, 1)
    gap = gram @ x + lift * x - a.double().mT @ b.double()
    assert gap.abs().max() < 1e-4 * gram.abs().max()


def test_fitted_values_stay_near_the_range_of_what_was_seen() -> None:
    """Keys that queries hardly look at are not given values that serve these queries alone."""
    view = view_of(seed=3)
    view = replace(view, keys=15 * view.keys)
    _, fit, _ = fitted(view, 16)
    low, high = torch.aminmax(view.values, dim=2, keepdim=True)
    room = 0.25001 * (high - low)
    assert ((fit.values >= low - room) & (fit.values <= high + room)).all()


def test_half_precision_comes_near() -> None:
    dtype = torch.bfloat16
    names = ("keys", "values", "hidden_states")
    half = replace(view_of(40), **{n: getattr(view_of(40), n).to(dtype) for n in names})
    same = replace(half, **{n: getattr(half, n).float() for n in names})
    got, want = shortened([half], 0.5)[0], shortened([same], 0.5)[0]
    assert got.keys.dtype == got.values.dtype == dtype
    both = set(got.slots[0, 0].tolist()) & set(want.slots[0, 0].tolist())
    assert len(both) >= got.slots.shape[2] - 2


@pytest.mark.parametrize(
    ("found", "got"),
    [(torch.zeros(1, 2, 3), r"\[1, 2, 3\]"), (None, "NoneType"), (torch.zeros(1) * 1j, "Tensor")],
)
def test_scores_that_are_no_number_for_each_key_are_refused(found: Any, got: str) -> None:
    message = rf"method: expected a number for each key, \[1, 2, 40\], got {got}"
    with pytest.raises(ValueError, match=message):
        shortened([view_of()], 0.5, Selection(lambda view: found))


def test_values_are_fitted_to_as_many_queries_whatever_scores_the_keys() -> None:
    view = view_of(300)
    own = Selection(lambda view: view.keys.norm(dim=-1)).score_layer(view, 0.5)
    queries, valid = view.future_queries(COUNT, AHEAD)
    assert torch.equal(own.queries, queries)
    assert torch.equal(own.valid, valid)


def test_a_layer_s_mask_adds_the_bias_of_keys_and_hides_padding() -> None:
    """Two new tokens, after 3 keys that stay of 6, the last of which is none."""
    bias = torch.tensor([[[0.5, -1.0, 7.0], [2.0, 3.0, 7.0]]])
    real = torch.tensor([[[True, True, False]] * 2])
    slots = torch.tensor([[[0, 4, 5], [1, 2, 5]]])
    keys = torch.zeros(1, 2, 3, 8)
    layer = CompressedLayer(Kept(keys, keys, slots, bias, real), 6)
    least = torch.finfo(torch.float32).min
    own = torch.where(real, bias, least)[0].repeat_interleave(2, 0)  # two heads of queries a key's
    later = torch.tensor([[0.0, least], [0.0, 0.0]])
    full = torch.zeros(1, 1, 2, 8)
    full[..., 0, 7] = least
    full[..., 2] = least  # what the model hides
    hidden = own.clone()
    hidden[2:, 1] = least
    for given, first in ((None, own), (full, hidden)):
        mask = layer.mask(given, 2, 4, torch.float32)
        assert mask is not None
        assert torch.equal(mask[0, :, :, :3], first.unsqueeze(1).expand(-1, 2, -1))
        assert torch.equal(mask[0, :, :, 3:], later.expand(4, -1, -1))
