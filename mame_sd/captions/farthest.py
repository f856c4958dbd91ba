"""Choose the visual tokens that stay, and merge the others into them.

The tokens that stay are the first of a farthest-first traversal of what the language model would
read, as in DivPrune (Alvar et al. 2025, arXiv 2503.02175). Every other token joins the nearest of
them, compared by the tower's tokens, and the mean takes its place. Similarities are cosines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mame_sd.core.groups import no_autocast


def farthest_first(similarity: Tensor, count: int) -> Tensor:
    """Choose the tokens of each sample that stay.

    The first one is the token whose nearest neighbour is farthest. Each next one is the token
    farthest from those chosen before.

    Args:
        similarity: similarity of all pairs, [B, L, L].
        count: number of tokens that stay, from 1 to L.

    Returns:
        LongTensor [B, count] of positions in ascending order.
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
    """Merge visual tokens into those that stay.

    Args:
        x: vectors as wide as the language model, [B, L, C]. The tokens that stay are chosen by
            them.
        like: the tower's tokens, [B, L, d], by which each other token finds the nearest one that
            stays. If None, x.
        keep: share of the tokens that stays, rounded to a whole number of at least one.

    Returns:
        Features [B, k, C] and their positions, LongTensor [B, k].
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
    """Return the cosines [..., L, L] of all pairs of rows of x [..., L, C].

    Pairs with a row that is not finite get -1.
    """
    exact = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    with no_autocast(exact):
        unit = F.normalize(exact, dim=-1)
        return (unit @ unit.mT).nan_to_num(nan=-1.0).clamp(-1, 1)
