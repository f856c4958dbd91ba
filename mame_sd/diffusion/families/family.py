"""Attention families: where the image's tokens are in a transformer's attention calls, and what
goes with them.

A UNet's self-attention is a function of its tokens alone. A transformer's is not. Text tokens share
the call or the sequence. Rotary positions are given beside the tokens. A video's tokens lie in
three dimensions. A `Family` says all of this for one kind of model, and `register_family` adds
yours. Take a model whose forward takes `hidden_states` [B, C, H, W], which it cuts into patches of
its config's `patch_size`, and whose attention takes `rotary`, (cos, sin), each [L, D]:

    from mame_sd.families import Family, along, patches, register_family

    register_family(
        Family("mine", ("MyTransformer",), ("MyAttention",), patches, along(rotary=0))
    )

Where none of the layouts fits, `tokens` and `select` are functions of your own (docs/usage.md).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from mame_sd.diffusion.context import Call, Tokens

Rows = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Family:
    """One kind of transformer.

    Attributes:
        name: for reports and errors.
        models: class names of models (or of parts of them) whose forward knows how the tokens lie.
        attention: class names of the self-attention modules below such a model, each with the last
            part of its path after a dot where others of that class are to be left alone:
            "WanAttention.attn1".
        tokens: (model, arguments of its forward) -> how the tokens lie; where that can't be known
            the reason, or None.
        select: (arguments of an attention call, rows) -> the arguments that hold one row per token,
            such as rotary positions. They are changed to those of the tokens that stay.
            `rows(tensor, dim)` picks them along `dim`, which may count the image's tokens or all of
            the sequence. None: there are none. Used where whole tokens merge.
        inputs: arguments of the attention that hold the tokens [B, L, C]. Where queries stay whole
            also [L, C] of one sample, or an image [B, C, H, W], whose own rows and columns then
            hold.
        outputs: where the attention returns a tuple, the entries of it that hold the image's
            tokens.
        outside: names of parts of the model whose attention is not over the image's tokens, such as
            a text refiner: none of theirs merges, whatever `attention` says.
        joint: in joint attention, whether the text's keys stand "first" or "last", behind the
            image's. Unless it is told, calls with text are left alone.
        text: the argument that holds the text of joint attention.
        kept_text: the argument that holds the text's keys [B, L, H, D] instead, where an earlier
            call has made them (diffusers' TextKVCache).
        keys: the argument that keys and values are made of, where that is another: it holds the
            image's tokens and text.
        leaves: arguments of the attention with which a call is left alone.
        mask: `select` takes care of `attention_mask`; else a call with one is left alone.
        queries: whether whole tokens can merge too (`tau`).
        cached: (arguments of the attention) -> whether keys of earlier calls stand before those of
            this one.
        by_sample: the attention runs over one sample after another, each with as much text as it
            has.
        references: `tokens` tells of reference images, so that these can merge too.
        blocks: why blocks can't be restored (`block_keep`); empty: they can.
        mlps: why MLPs can't be restored (`mlp_keep`); empty: they can.
        shared_mlp: an MLP is called with the image's tokens and then with the text's.
        parallel: two self-attentions of a block read the same tokens, not one the other's output.
        sequence_first: MLPs are called with tokens [L, B, C].
        eager: `tokens` reads values of tensors, not only shapes, and so runs outside of compiled
            graphs.
    """

    name: str
    models: tuple[str, ...]
    attention: tuple[str, ...]
    tokens: Callable[[Any, Call], Tokens | str | None]
    select: Callable[[Call, Rows], dict[str, Any]] | None = None
    inputs: tuple[str, ...] = ("hidden_states",)
    outputs: tuple[int, ...] = (0,)
    outside: tuple[str, ...] = ()
    joint: Literal["first", "last"] | None = None
    text: str = "encoder_hidden_states"
    kept_text: str = ""
    keys: str | None = None
    leaves: tuple[str, ...] = ()
    mask: bool = False
    queries: bool = True
    cached: Callable[[Call], bool] | None = None
    by_sample: bool = False
    references: bool = False
    blocks: str = ""
    mlps: str = ""
    shared_mlp: bool = False
    parallel: bool = False
    sequence_first: bool = False
    eager: bool = False

    def __post_init__(self) -> None:
        if self.joint not in ("first", "last", None):
            raise ValueError(f"joint: expected 'first', 'last' or None, got {self.joint!r}")

    def owns(self, path: str, module: nn.Module) -> bool:
        """Whether `module` at `path` is a self-attention of this family."""
        parts = path.split(".")
        if not set(self.outside).isdisjoint(parts):
            return False
        return any(
            kind in self.attention or f"{kind}.{parts[-1]}" in self.attention
            for kind in class_names(module)
        )

    def knows(self, path: str, module: nn.Module) -> bool:
        """Whether attention of this class at `path` is known, whether it merges or not."""
        known = {entry.partition(".")[0] for entry in self.attention}
        return is_one_of(module, known) or not set(self.outside).isdisjoint(path.split("."))


def class_names(module: nn.Module) -> list[str]:
    """Return the names of a module's class and of all its bases: users derive classes, and FSDP2
    renames those of a model's modules.
    """
    return [kind.__name__ for kind in type(module).__mro__]


def is_one_of(module: nn.Module, names: Container[str]) -> bool:
    """Whether the class of a module, or one of its bases, has one of these names."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


# By class name of the model; these come before the built-in ones.
REGISTERED: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Makes `apply_mame` know the models that `family` names, instead of any family, built-in or
    not, that named them.
    """
    for model in family.models:
        REGISTERED[model] = family
    return family
