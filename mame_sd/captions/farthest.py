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


def farthest_first(similarity: Tensor, count: int) -> Tensor:
    """Choose the tokens of each sample that stay, LongTensor [B, count] in the order of their
    places.

    The first is the one whose nearest neighbour is farthest. Each next one is farthest from the
    nearest of those before.

    Args:
        similarity: of all pairs [B, L, L].
        count: how many stay, from 1 to L.
    """
    diagonal = torch.eye(similarity.shape[1], dtype=torch.bool, device=similarity.device)
    place = similarity.masked_fill(diagonal, -torch.inf).amax(-1).argmin(-1, keepdim=True)  # [B, 1]
    places = [place]
    nearest = torch.full_like(similarity[:, 0], -torch.inf)  # [B, L] to those that stay
    for _ in range(count - 1):
        row = similarity.gather(1, place[..., None].expand(-1, 1, similarity.shape[2]))[:, 0]
        nearest = torch.maximum(nearest, row).scatter(1, place, torch.inf)
        place = nearest.argmin(-1, keepdim=True)
        places.append(place)
    return torch.cat(places, 1).sort(1).values


def merged(x: Tensor, like: Tensor | None, keep: float) -> tuple[Tensor, Tensor]:
    """Merge visual tokens x [B, L, C] into those that stay: features [B, k, C] and their places,
    LongTensor [B, k].

    Args:
        x: vectors as wide as the language model. By these tokens are chosen that stay.
        like: [B, L, d], by which others find the nearest of these: the tower's tokens. None: by x.
        keep: share of them that stays, to the next whole number and at least one.
    """
    samples, length, channels = x.shape
    count = max(1, round(keep * length))
    every = torch.arange(length, device=x.device).expand(samples, -1)
    if count == length:
        return x, every
    similarity = cosines(x)
    places = farthest_first(similarity, count)
    nearness = similarity if like is None else cosines(like)
    owner = nearness.gather(2, places[:, None].expand(-1, length, -1)).argmax(2)  # [B, L]
    owner = owner.scatter(1, places, every[:, :count])
    owner = (owner + count * torch.arange(samples, device=x.device)[:, None]).flatten()
    exact = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)
    summed = exact.new_zeros(samples * count, channels).index_add(0, owner, exact)
    sizes = torch.bincount(owner, minlength=samples * count).unsqueeze(-1)
    return (summed / sizes).to(x.dtype).unflatten(0, (samples, count)), places


def cosines(x: Tensor) -> Tensor:
    """Compute the cosines of all pairs of x [..., L, C], [..., L, L]; -1 of what is not finite."""
    exact = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    with no_autocast(exact):
        unit = F.normalize(exact, dim=-1)
        return (unit @ unit.mT).nan_to_num(nan=-1.0).clamp(-1, 1)
