"""Find the MLPs, blocks and parts of blocks of a model that can be restored, and hook them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from mame_sd.diffusion.context import HandleState
from mame_sd.diffusion.families.family import Family
from mame_sd.diffusion.fused_mlp import FusedInHook, FusedMLP, FusedOutHook, module_at
from mame_sd.diffusion.layer import LayerHook, LayerStats
from mame_sd.diffusion.restoring import (
    GATED,
    SEVERAL,
    BlockHook,
    CrossAttentionHook,
    MLPHook,
    PartHook,
    QueryHook,
    RestoreHook,
    TextHook,
)

_MLP = re.compile("FeedForward|SwiGLU|MLP$")  # of a class's name
_OTHERS = ("context", "txt", "text", "audio", "ff_t")  # in names of MLPs of other tokens
# Children of a block that are linear maps of its tokens, where MLP and attention are fused.
_FUSED = ("proj_mlp", "proj_out", "gate_proj", "up_proj", "down_proj")
_OUTPUT = ("to_out.0", "to_out")  # the projection of attention's output, in the attention


def restoring_hooks(
    root: nn.Module, shared: HandleState, attention: Mapping[str, tuple[LayerHook, Family]]
) -> Iterator[tuple[str, nn.Module, RestoreHook]]:
    """Yield the path, the module and the hook of each MLP, block and part of a block of `root`.

    Args:
        root: the model.
        shared: state that the hooks of a handle share.
        attention: the hooks of the self-attentions that merge by path, each with its family.

    Yields:
        Paths, modules and hooks.
    """
    modules = {root.get_submodule(path) for path in attention}
    blocks: dict[str, list[str]] = {}  # paths of the attentions in each block
    for path in attention:
        outer = path.rpartition(".")[0]
        if path and not isinstance(root.get_submodule(outer), (nn.ModuleList, nn.ModuleDict)):
            blocks.setdefault(outer, []).append(path)
    for number, (outer, paths) in enumerate(blocks.items()):
        block, (hook, family) = root.get_submodule(outer), attention[paths[0]]
        fused = None
        for name, part, kind in _parts_of(block, modules, family):
            path = f"{outer}.{name}" if outer else name
            stats = LayerStats(path, hook.stats.device, "text" if kind is TextHook else "mlp")
            part_hook = kind(shared, stats, hook.layouts, number, family)
            if isinstance(part_hook, FusedInHook):
                owner = name.rpartition(".")[0]  # the attention, in Flux 2
                if owner:
                    shared_by: Any = block.get_submodule(owner)
                    part_hook.ahead = 3 * shared_by.inner_dim
                fused = FusedMLP(part_hook, name, f"{owner}.to_out" if owner else "proj_out")
            yield path, part, part_hook
        if outer:
            stats = LayerStats(outer, hook.stats.device, "block")
            block_hook = BlockHook(shared, stats, hook.layouts, number, family)
            several = len(paths) > 1 and not family.parallel
            gated = outer.endswith(".fuser")
            if fused is not None:
                block_hook.fused, block_hook.for_mlps = fused, True
            block_hook.never = family.blocks or (SEVERAL if several else GATED if gated else "")
            yield outer, block, block_hook


def _parts_of(
    block: nn.Module, attention: set[nn.Module], family: Family
) -> Iterator[tuple[str, nn.Module, type[RestoreHook]]]:
    """Yield the modules of a block that treat each token by itself.

    Yields:
        The path in the block, the module, and the class of its hook.
    """
    for name, child in block.named_children():
        kinds = [kind.__name__ for kind in type(child).__mro__]  # a tool's subclass, too
        if child in attention:
            fused = module_at(child, "to_qkv_mlp_proj")
            out = module_at(child, "to_out")
            columns: Any = getattr(child, "inner_dim", 0)
            if fused and out and _share_projection(fused, out, 3 * columns):
                yield f"{name}.to_qkv_mlp_proj", fused, FusedInHook
                yield f"{name}.to_out", out, FusedOutHook
                continue
            queries = module_at(child, "to_q")
            if queries is not None:
                yield f"{name}.to_q", queries, QueryHook
            for path in _OUTPUT:
                part = module_at(child, path)
                if part is not None and not isinstance(part, nn.ModuleList):
                    yield f"{name}.{path}", part, PartHook
                    break
        elif any(map(_MLP.search, kinds)) and not any(other in name for other in _OTHERS):
            yield name, child, MLPHook
        elif name == "ff_context" and family.equal_text:
            yield name, child, TextHook
        elif name in ("proj_mlp", "proj_out") and _share_projection(
            module_at(block, "proj_mlp"), module_at(block, "proj_out")
        ):
            yield name, child, FusedInHook if name == "proj_mlp" else FusedOutHook
        elif name in _FUSED:
            yield name, child, PartHook
        elif any(kind.endswith("Attention") for kind in kinds) and "audio" not in name:
            yield name, child, CrossAttentionHook


def _share_projection(into: Any, out: Any, ahead: int = 0) -> bool:
    """Return True if `out` projects [attention | MLP], and `into` into the MLP, plain or gated."""
    hidden: int = getattr(out, "in_features", 0) - getattr(out, "out_features", 0)
    return hidden > 0 and getattr(into, "out_features", 0) - ahead in (hidden, 2 * hidden)
