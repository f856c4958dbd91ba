"""Forms of attention over fewer keys (benchmarks.forms): groups, counts, what a fit restores."""

from __future__ import annotations

import torch

from benchmarks.forms import Draw, Fit, Merged, Picked, concatenated, exact, planned, sizes

GRID = (32, 48)


def heads(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 2, GRID[0] * GRID[1], 8, generator=generator)
    return q, k, v


def error(form: Merged | Picked) -> float:
    q, k, v = heads()
    want = exact(q, k, v, GRID, Draw.of(0))
    return ((form(q, k, v, GRID, Draw.of(0)) - want).norm() / want.norm()).item()


def test_groups_hold_every_token_once_and_the_farthest_alone() -> None:
    _, k, _ = heads()
    k[:, :, 100] *= 50  # like a sink: far from every other key
    for tiles in (0, 16):
        groups = planned(
            concatenated(k), GRID, 1 / 4, Draw.of(0), tiles, near="euclidean", alone=1 / 8
        )
        n = sizes(groups, k)
        assert groups.kept == n.shape[2] == k.shape[2] // 4
        assert n.min() == 1
        assert (n.sum(2) == k.shape[2]).all()
        assert len(groups.places) == groups.kept * 7 // 8
        of = groups.of[:, 0, 100]
        assert (n.gather(2, of.view(2, 1, 1).expand(2, 2, 1)) == 1).all()


def test_with_every_key_nothing_is_lost() -> None:
    assert error(Merged(1, alone=0)) < 1e-5
    assert error(Picked(1)) < 1e-5


def test_a_fit_answers_its_own_queries_and_what_stands_beside_stays() -> None:
    q, k, v = heads()
    draw = Draw(torch.Generator().manual_seed(0), beside=(k[:, :, :5] + 1, v[:, :, :5] - 1))
    want = exact(q, k, v, GRID, draw)
    got = Merged(1 / 4, Fit(len(q[0, 0]), lam=1e-2))(q, k, v, GRID, draw)
    rough = Merged(1 / 4)(q, k, v, GRID, draw)
    assert (got - want).norm() < 0.5 * (rough - want).norm()
    assert error(Merged(1 / 4, Fit(64))) < error(Merged(1 / 4))
