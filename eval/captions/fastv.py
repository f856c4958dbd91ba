"""FastV drops visual tokens after the second layer of the language model (Chen et al. 2024, arXiv
2403.06764). They are those that the last token attends to least.

For one prompt at a time, without padding. Layers keep caches of unequal lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

LAYER = 2  # the first that reads fewer tokens: FastV's K


class Pruning:
    """What the layers of one prompt share.

    Attributes:
        visual: bool [L], True at visual tokens; None: the call prunes nothing.
        keep: share of them that stays.
        rows: LongTensor [L'] of the tokens that stay, in the call that runs.
        weights: [L] the last token's attention in the layer before, in the call that runs.
    """

    def __init__(self, keep: float) -> None:
        self.keep = keep
        self.visual: Tensor | None = None
        self.rows: Tensor | None = None
        self.weights: Tensor | None = None

    def choose(self) -> Tensor:
        """The tokens that stay: text, and visual tokens of most weight."""
        assert self.visual is not None
        assert self.weights is not None
        places = self.visual.nonzero()[:, 0]
        count = max(1, round(self.keep * len(places)))
        best = self.weights[places].topk(count).indices
        stay = ~self.visual
        stay[places[best]] = True
        return stay.nonzero()[:, 0]


def last_weights(attention: Any, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """[L] the attention of the last token of normed x [1, L, C] to all tokens, mean over heads.

    Args:
        attention: of a Llama: q_proj, k_proj.
        x: what the attention is given.
        turns: cosines and sines of positions, [1, L, d].
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    size = (*x.shape[:-1], -1, attention.head_dim)
    q = attention.q_proj(x).view(size).transpose(1, 2)
    k = attention.k_proj(x).view(size).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *turns)
    k = repeat_kv(k, q.shape[1] // k.shape[1])
    logits = q[:, :, -1:] @ k.transpose(2, 3) * attention.head_dim**-0.5
    weights: Tensor = logits.float().softmax(-1).mean((0, 1, 2))
    return weights


@contextmanager
def fastv(language: Any, keep: float) -> Iterator[Pruning]:
    """The language model drops visual tokens in calls for which `visual` of the result is set.

    Args:
        language: Llama's inner model, whose `layers` are decoder layers.
        keep: share of visual tokens that layers from `LAYER` on read.
    """
    shared, hooks = Pruning(keep), []

    def listen(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if shared.visual is not None:
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            shared.weights = last_weights(module, x, kwargs["position_embeddings"])

    def drop(number: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if shared.visual is None:
            return None
        x = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        if number == LAYER:
            shared.rows = shared.choose()
            x = x[:, shared.rows]
        rows = shared.rows
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = cos[:, rows], sin[:, rows]
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][:, rows]
        mask = kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = mask[:, :, rows][:, :, :, rows]
        return (x, *args[1:]), kwargs

    def done(module: Any, args: Any, output: Any) -> None:
        shared.visual = shared.rows = shared.weights = None

    try:
        for number, layer in enumerate(language.layers):
            if number == LAYER - 1:
                hooks.append(layer.self_attn.register_forward_pre_hook(listen, with_kwargs=True))
            if number >= LAYER:

                def before(module: Any, args: Any, kwargs: Any, number: int = number) -> Any:
                    return drop(number, module, args, kwargs)

                hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(language.register_forward_hook(done))
        yield shared
    finally:
        for hook in hooks:
            hook.remove()


def dropped_after(keep: float, visual: int, layers: int) -> float:
    """Visual tokens that a layer of `layers` reads in the mean.

    >>> dropped_after(0.25, 80, 30)
    24.0
    """
    return (LAYER * visual + (layers - LAYER) * round(keep * visual)) / layers
