"""Merging behind the vision tower: which visual tokens stay, and what merges into them.

Those stay that are farthest from one another by what the language model would read. They are the
first of a farthest-first traversal, which DivPrune (Alvar et al. 2025, arXiv 2503.02175) takes to
choose what it keeps. Every other token joins the nearest of these by the tower's tokens, and the
mean stands at its place. Similarities are cosines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mame_sd.core.merge import no_autocast


def farthest_first(similarity: Tensor, count: int, tau: float | None = None) -> list[Tensor]:
    """Choose the tokens of each sample that stay, LongTensor [k] in the order of their places.

    The first is the one whose nearest neighbour is farthest. Each next one is farthest from the
    nearest of those before.

    Args:
        similarity: of all pairs [B, L, L].
        count: how many stay, from 1 to L; with `tau` at most.
        tau: no more stay once every token is more similar than this to one that does.
    """
    diagonal = torch.eye(similarity.shape[1], dtype=torch.bool, device=similarity.device)
    place = similarity.masked_fill(diagonal, -torch.inf).amax(-1).argmin(-1, keepdim=True)  # [B, 1]
    places, reached = [place], []
    nearest = torch.full_like(similarity[:, 0], -torch.inf)  # [B, L] to those that stay
    for _ in range(count - 1):
        row = similarity.gather(1, place[..., None].expand(-1, 1, similarity.shape[2]))[:, 0]
        nearest = torch.maximum(nearest, row).scatter(1, place, torch.inf)
        near, place = nearest.min(-1, keepdim=True)
        if tau is not None and bool((near > tau).all()):
            break
        places.append(place)
        reached.append(near)
    found = torch.cat(places, 1)
    if tau is None:
        return list(found.sort(1).values)
    stays = torch.cat(
        [torch.ones_like(found[:, :1], dtype=torch.bool), *(n <= tau for n in reached)], 1
    )
    return [own[stay].sort().values for own, stay in zip(found, stays, strict=True)]


def merged(
    x: Tensor, like: Tensor | None, keep: float | None, tau: float | None
) -> list[tuple[Tensor, Tensor]]:
    """Merge visual tokens x [B, L, C] into those that stay: of each sample features [k, C] and
    their places, LongTensor [k].

    Args:
        x: vectors as wide as the language model. By these tokens are chosen that stay.
        like: [B, L, d], by which others find the nearest of these: the tower's tokens. None: by x.
        keep: share of them that stays, to the next whole number and at least one; None: by `tau`.
        tau: similarity above which a token merges.
    """
    length = x.shape[1]
    count = length if keep is None else max(1, round(keep * length))
    if keep is not None and count == length:
        return [(one, torch.arange(length, device=x.device)) for one in x]
    found = []
    similarity = cosines(x)
    chosen = farthest_first(similarity, count, tau)
    nearness = similarity if like is None else cosines(like)
    for one, near, places in zip(x, nearness, chosen, strict=True):
        if len(places) < length:
            owner = near[:, places].argmax(1)
            owner[places] = torch.arange(len(places), device=x.device)
            one = _means(one, owner, len(places))
        found.append((one, places))
    return found


def cosines(x: Tensor) -> Tensor:
    """Compute the cosines of all pairs of x [..., L, C], [..., L, L]; -1 of what is not finite."""
    exact = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    with no_autocast(exact):
        unit = F.normalize(exact, dim=-1)
        return (unit @ unit.mT).nan_to_num(nan=-1.0).clamp(-1, 1)


def _means(x: Tensor, owner: Tensor, count: int) -> Tensor:
    """Average the tokens x [L, C] of each owner, LongTensor [L], as [k, C]."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    summed = exact.new_zeros(count, x.shape[1]).index_add(0, owner, exact)
    sizes = torch.bincount(owner, minlength=count).unsqueeze(-1)
    return (summed / sizes).to(x.dtype)
