"""Published methods and the paper's merging of caches, compared with float64 loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mame_sd.eval.caches.merging import CausalMaMe, causal_weights
from mame_sd.eval.caches.methods import KVzip, Ours, Published, expected_attention
from mame_sd.eval.caches.rows import all_rows
from tests.caches.views import view_of
from tests.eval.caches import oracle

ROWS = {name: method for name, method in all_rows().items() if name != "kvzip"}


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
    kvzip = KVzip()
    kvzip.repeated = lambda views: [expected_attention(view) for view in views]
    for method in (Published(expected_attention), kvzip):
        kept = method.compress_all(views, 0.25)
        sizes = [one.real_keys().sum(-1)[0].tolist() for one in kept]
        assert sum(map(sum, sizes)) == 96
        assert all(layer == [16, 16] for layer in sizes) is not (method is kvzip)


def test_a_loop_picks_the_same_keys() -> None:
    scores = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(3))
    (kept,) = Published(lambda view: scores).compress_all([view_of(32)], 0.5)
    for head in range(2):
        fixed = {*range(4), *range(24, 32)}
        rest = sorted(set(range(32)) - fixed, key=lambda t: -float(scores[0, head, t]))
        assert set(kept.slots[0, head].tolist()) == fixed | set(rest[:4])


def least(x: Tensor, merges: int) -> float:
    """Return the tau above which that many sources of tokens x [n, C] merge causally."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    best = (unit[1::2] @ unit[::2].T).masked_fill(
        ~torch.ones(len(x) // 2, len(x) // 2).tril().bool(), -1
    )
    return float(best.amax(0).sort(descending=True).values[merges - 1]) - 1e-6


@pytest.mark.parametrize("merges", [4, 10])
def test_causal_weights_are_the_papers(merges: int) -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    found, stays = causal_weights(x, merges)
    want = oracle.causal_weights(x, least(x, merges))
    torch.testing.assert_close(found.double(), want, atol=2e-5, rtol=1e-4)
    assert torch.equal(stays, want.sum(0) == 0)
    assert int(stays.sum()) >= 10 - merges  # the mask may take all that the mean has left


def test_the_paper_merges_keys_and_values_by_its_weights() -> None:
    view = view_of(30, seed=2)
    kept = CausalMaMe(sinks=0, recent=0).compress(view, 22 / 30)  # 8 of 15 sources, in one round
    fusion = oracle.causal_weights(view.hidden_states[0], least(view.hidden_states[0], 8))
    at = (kept.slots[0, 0] % 2).bool()  # the destinations
    for whole, found in ((view.keys, kept.keys), (view.values, kept.values)):
        for head in range(2):
            want = oracle.merged(whole[0, head], fusion)
            torch.testing.assert_close(found[0, head, at].double(), want, atol=1e-5, rtol=1e-4)
