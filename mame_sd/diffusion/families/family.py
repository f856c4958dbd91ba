"""Describe attention families: where the image's tokens are in a transformer's attention calls.

A UNet's self-attention is a function of its tokens alone. A transformer's is not: text tokens share
the call or the sequence, rotary positions are passed next to the tokens, and a video's tokens have
three dimensions. A `Family` describes this for one kind of model, and `register_family` adds
your own. For example, a model's forward takes `hidden_states` [B, C, H, W], which it cuts into
patches of its config's `patch_size`, and its attention takes `rotary`, (cos, sin), each [L, D]:

    from mame_sd.families import Family, along, patches, register_family

    register_family(
        Family("mine", ("MyTransformer",), ("MyAttention",), patches, along(rotary=0))
    )

If no layout fits, pass functions of your own as `tokens` and `select` (docs/usage.md).
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
        name: name in reports and errors.
        models: class names of models (or of parts of them) whose forward determines the layout of
            the tokens.
        attention: class names of the self-attention modules below such a model. To exclude other
            modules of the same class, add the last part of the path after a dot:
            "WanAttention.attn1".
        tokens: (model, arguments of its forward) -> the layout of the tokens, or the reason why it
            is unknown, or None.
        select: (arguments of an attention call, rows) -> the arguments that have one row per token,
            such as rotary positions, reduced to the tokens that stay. `rows(tensor, dim)` selects
            the rows along `dim`, which may count the image's tokens or those of the whole sequence.
            If None, there are no such arguments. It is used if whole tokens merge.
        inputs: arguments of the attention that hold the tokens [B, L, C]. If `queries` is False,
            also [L, C] of one sample, or an image [B, C, H, W], whose own rows and columns are
            used.
        outputs: if the attention returns a tuple, the entries that hold the image's tokens.
        outside: names of parts of the model whose attention is not over the image's tokens, such as
            a text refiner. Nothing in them merges, whatever `attention` says.
        joint: position of the text's keys in joint attention, "first" or "last" (after the
            image's). If None, calls with text are not merged.
        text: the argument that holds the text of joint attention.
        text_keys: (arguments of the attention, layout) -> the number of the text's keys in joint
            attention, or None if each sample has its own. If None, the length of `text`.
        leaves: arguments of the attention that prevent merging if they are given.
        mask: if True, `select` handles `attention_mask`. If False, a call with a mask is not
            merged.
        queries: if True, whole tokens can merge too (`tau`).
        cached: (arguments of the attention) -> True if keys of earlier calls precede those of this
            call.
        references: if True, `tokens` returns the sizes of reference images, so that these can merge
            too.
        blocks: reason why blocks can't be restored (`block_keep`). Empty if they can.
        shared_mlp: if True, one MLP is called with the image's tokens and then with the text's.
        parallel: if True, two self-attentions of a block read the same tokens, and neither reads
            the other's output.
        equal_text: if True, texts may end in equal tokens, and text tokens have no positions in the
            model, so that such tokens stay equal (`core.groups.equal_at_end`).
        sequence_first: if True, MLPs are called with tokens [L, B, C].
        eager: if True, `tokens` reads values of tensors, not only shapes, and so runs outside of
            compiled graphs.
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
    text_keys: Callable[[Call, Tokens], int | None] | None = None
    leaves: tuple[str, ...] = ()
    mask: bool = False
    queries: bool = True
    cached: Callable[[Call], bool] | None = None
    references: bool = False
    blocks: str = ""
    shared_mlp: bool = False
    parallel: bool = False
    equal_text: bool = False
    sequence_first: bool = False
    eager: bool = False

    def __post_init__(self) -> None:
        if self.joint not in ("first", "last", None):
            raise ValueError(f"joint: expected 'first', 'last' or None, got {self.joint!r}")

    def owns(self, path: str, module: nn.Module) -> bool:
        """Return True if `module` at `path` is a self-attention of this family."""
        parts = path.split(".")
        if not set(self.outside).isdisjoint(parts):
            return False
        return any(
            kind in self.attention or f"{kind}.{parts[-1]}" in self.attention
            for kind in class_names(module)
        )

    def knows(self, path: str, module: nn.Module) -> bool:
        """Return True if the family covers `module` at `path`, whether it merges or not."""
        classes = {entry.partition(".")[0] for entry in self.attention}
        return is_one_of(module, classes) or not set(self.outside).isdisjoint(path.split("."))


def class_names(module: nn.Module) -> list[str]:
    """Return the names of a module's class and of all its bases.

    Bases count because users derive classes, and FSDP2 renames those of a model's modules.
    """
    return [kind.__name__ for kind in type(module).__mro__]


def is_one_of(module: nn.Module, names: Container[str]) -> bool:
    """Return True if the class of a module, or one of its bases, has one of these names."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


# Families by class name of the model. They take precedence over the built-in ones.
REGISTERED: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Register a family for the models that it names. `apply_mame` then merges them.

    It replaces any family, built-in or not, of these models.
    """
    for model in family.models:
        REGISTERED[model] = family
    return family
