"""Published methods and the paper's merging of caches, compared with float64 loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mame_sd.caches import CacheView, Kept
from mame_sd.eval.caches.merging import CausalMaMe, strict_weights, weights
from mame_sd.eval.caches.methods import Published
from mame_sd.eval.caches.rows import Ours, all_rows, scores_of
from tests.caches import oracle
from tests.caches.views import view_of

ROWS = {name: row.method for name, row in all_rows().items() if not name.startswith("kvzip")}


@pytest.mark.parametrize("keep", [0.75, 0.125])
@pytest.mark.parametrize("name", ROWS)
def test_every_method_keeps_what_was_asked_for(name: str, keep: float) -> None:
    views = [view_of(48, seed=i, layer=i) for i in range(2)]
    kept = ROWS[name].compress_all(views, keep)
    total = sum(int(one.real_keys().sum()) for one in kept)
    share = 64 / 72 if isinstance(ROWS[name], Ours) else 1  # biases and slots are bytes too
    assert abs(total - 48 * keep * share * 4) <= (4 if share < 1 else 0)
    for one in kept:
        assert one.keys.isfinite().all()
        assert one.values.isfinite().all()
        for head in range(2):
            slots = one.slots[0, head][one.real_keys()[0, head]].tolist()
            assert len(set(slots)) == len(slots)
            assert 47 in slots


def test_shares_of_heads_and_layers_add_up() -> None:
    views = [
        replace(view_of(64, seed=i, layer=i), values=view_of(64, seed=i).values * (1 + 5 * i))
        for i in range(3)
    ]
    scores = scores_of(all_rows()["expected-attention"])
    for together in (False, True):
        kept = Published(scores, together).compress_all(views, 0.25)
        sizes = [one.real_keys().sum(-1)[0].tolist() for one in kept]
        assert sum(map(sum, sizes)) == 96
        assert all(layer == [16, 16] for layer in sizes) is not together


def test_a_loop_picks_the_same_keys() -> None:
    scores = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(3))

    class Drawn:
        def score(self, view: CacheView) -> Tensor:
            return scores

    (kept,) = Published(Drawn()).compress_all([view_of(32)], 0.5)
    for head in range(2):
        fixed = {*range(4), *range(24, 32)}
        rest = sorted(set(range(32)) - fixed, key=lambda t: -float(scores[0, head, t]))
        assert set(kept.slots[0, head].tolist()) == fixed | set(rest[:4])


@pytest.mark.parametrize("tau", [-0.2, 0.3])
def test_causal_weights_are_the_papers(tau: float) -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    found, stays = weights(x, tau, "mask", None)
    want = oracle.causal_weights(x, tau)
    torch.testing.assert_close(found.double(), want, atol=2e-5, rtol=1e-4)
    assert torch.equal(stays, want.sum(0) == 0)


def test_strict_weights_are_those_of_a_loop() -> None:
    s = torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        strict_weights(s, 0.3).double(), oracle.strict_weights(s, 0.3), atol=1e-5, rtol=1e-4
    )


def test_the_paper_merges_keys_and_values_by_its_weights() -> None:
    view = view_of(30)
    method = CausalMaMe(tau=0.1, sinks=0, recent=0)
    kept = method.compress(view, 0.5)
    fusion = oracle.causal_weights(view.hidden_states[0], 0.1)
    merged = (oracle.merged(t[0].transpose(0, 1), fusion) for t in (view.keys, view.values))
    for i, (key, value) in enumerate(zip(*merged, strict=True)):
        at = (kept.slots[0, 0] == 2 * i + 1).nonzero()[0, 0]
        torch.testing.assert_close(kept.keys[0, :, at].double(), key, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(kept.values[0, :, at].double(), value, atol=1e-5, rtol=1e-4)


def earlier_change(causal: str) -> float:
    """How far merged destinations before token 24 move when tokens from 24 on are other ones."""
    view = view_of(30)
    method = CausalMaMe(causal, tau=0.05, sinks=0, recent=0)
    other = replace(
        view, **{n: getattr(view, n).clone() for n in ("keys", "values", "hidden_states")}
    )
    for part in (other.keys, other.values):
        part[:, :, 24:] += torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(5))
    other.hidden_states[:, 24:] = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(6))
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
