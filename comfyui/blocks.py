"""SD3 and AuraFlow: their layers merge before their projections, as `apply_mame` merges them.

The engine hands attention to a node only after projections and norms. But it lets a node replace
each block ("dit" of `patches_replace`), and a block asks its own attention for projections. So a
replaced block runs the engine's own code, with a stand-in for that attention. It merges what comes
in and restores what goes out. The model itself is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from mame_sd.core.detail import Detail
from mame_sd.diffusion.families.keys import CountedKeys, MergedKeys

from .attention import EngineCall
from .layers import Key

Replacement = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


class Instead:
    """An engine's module with other parts: its methods find those, and all else in the module."""

    def __init__(self, module: Any, **parts: Any) -> None:
        self.module = module
        self.parts = parts

    def __getattr__(self, name: str) -> Any:
        if name in self.parts:
            return self.parts[name]
        method = getattr(type(self.module), name, None)
        if isinstance(method, FunctionType):
            return partial(method, self)  # a MethodType breaks a compiled graph
        return getattr(self.module, name)


class Merged:
    """One attention of one call: what comes in merges, what goes out is restored.

    Args:
        patch: plans what merges.
        call: of the model.
        key: of the layer.
    """

    def __init__(self, patch: Any, call: Any, key: Key) -> None:
        self.patch, self.call, self.key = patch, call, key
        self.plan: Any = None
        self.detail: Detail | None = None

    def before(self, x: Tensor) -> Tensor:
        """The image's tokens [B, L, C], merged where queries merge too."""
        planned = self.patch.planned(self.call, self.key, x)
        if planned is None:
            self.call.awaited.append(None)
            return x
        self.call.awaited.append(self._attend)
        self.plan, self.config, self.tokens = planned
        if self.config.merge == "kv":
            return x
        if self.config.detail:
            self.detail = Detail(x, self.tokens.plane)
        merged: Tensor = self.plan.merge(x)
        return merged

    def after(self, x: Tensor) -> Tensor:
        """The output of all of the image's tokens."""
        if self.plan is None or self.config.merge == "kv":
            return x
        restored: Tensor = self.plan.restore(x, self.detail)
        return restored

    def _attend(self, engine: EngineCall) -> Tensor:
        """The output of the engine's call with merged tokens, behind any number of others."""
        plan, config = self.plan, self.config
        batch, length = engine.heads_last(engine.k).shape[:2]
        if config.merge == "kv":
            first = length - plan.tokens_in
            return engine.attended(
                MergedKeys(
                    plan, self.tokens, (batch, length), first, correct=config.correct, drawn=True
                )
            )
        first = length - plan.tokens_kept
        if not config.correct or not (plan.uneven or first):
            return engine.run()
        return engine.attended(CountedKeys(plan.sizes, first, 0, batch))


class Projections:
    """SD3's attention: it projects before the block attends, and after it."""

    def __init__(self, attn: Any, merged: Merged) -> None:
        self.attn, self.merged, self.num_heads = attn, merged, attn.num_heads

    def pre_attention(self, x: Tensor) -> Any:
        return self.attn.pre_attention(self.merged.before(x))

    def post_attention(self, x: Tensor) -> Tensor:
        return self.merged.after(self.attn.post_attention(x))


def joint_block(block: Any, patch: Any, call: Any, key: Key, args: Mapping[str, Any]) -> Any:
    """SD3's block."""
    x_block = block.x_block
    parts = {"attn": Projections(x_block.attn, Merged(patch, call, key))}
    if x_block.x_block_self_attn:
        parts["attn2"] = Projections(x_block.attn2, Merged(patch, call, (*key, 1)))
    own = Instead(block, x_block=Instead(x_block, **parts))
    text, image = own.forward(
        args["txt"],
        args["img"],
        c=args["vec"],
        use_checkpoint=False,
        transformer_options=args["transformer_options"],
    )
    return {"txt": text, "img": image}


def double_layer(block: Any, patch: Any, call: Any, key: Key, args: Mapping[str, Any]) -> Any:
    """AuraFlow's block of text and image apart."""
    merged = Merged(patch, call, key)

    def attn(text: Tensor, image: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        text, image = block.attn(text, merged.before(image), **options)
        return text, merged.after(image)

    given = {"transformer_options": args["transformer_options"]}
    text, image = Instead(block, attn=attn).forward(args["txt"], args["img"], args["vec"], **given)
    return {"txt": text, "img": image}


def single_layer(block: Any, patch: Any, call: Any, key: Key, args: Mapping[str, Any]) -> Any:
    """AuraFlow's block of text and image in one sequence."""
    merged, text = Merged(patch, call, key), args["img"].shape[1] - call.place.padded

    def attn(both: Tensor, **options: Any) -> Tensor:
        image = merged.before(both[:, text:])
        output = block.attn(torch.cat([both[:, :text], image], 1), **options)
        return torch.cat([output[:, :text], merged.after(output[:, text:])], 1)

    given = {"transformer_options": args["transformer_options"]}
    return {"img": Instead(block, attn=attn).forward(args["img"], args["vec"], **given)}


KINDS = {"joint_blocks": joint_block, "double_layers": double_layer, "single_layers": single_layer}


def replaced(
    others: Mapping[Any, Replacement], blocks: Mapping[Key, tuple[str, Any]], patch: Any, call: Any
) -> dict[Any, Replacement]:
    """The replacements of `others`, with ours of each of `blocks` as what they call the original.

    Args:
        others: another node's, by ("double_block", place).
        blocks: the kind and the module of each block, by ("double", place).
    """
    ours: dict[Any, Replacement] = dict(others)
    for key, (kind, block) in blocks.items():
        name = f"{key[0]}_block", key[1]
        ours[name] = _replacement(KINDS[kind], block, patch, call, key, others.get(name))
    return ours


def _replacement(
    run: Callable[..., Any], block: Any, patch: Any, call: Any, key: Key, other: Replacement | None
) -> Replacement:
    def original(args: dict[str, Any]) -> dict[str, Any]:
        call.awaited.clear()
        output: dict[str, Any] = run(block, patch, call, key, args)
        if call.awaited:
            call.awaited.clear()
            call.run.unreached = True
        return output

    def replacement(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        return (
            original(args) if other is None else other(args, {**extra, "original_block": original})
        )

    return replacement
