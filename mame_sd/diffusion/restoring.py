"""Compute MLPs and blocks of a denoiser on a few tokens, and restore all others by a fit.

- `mlp_keep`: each MLP is computed on a share of the image's tokens. Its output for all other
  tokens is restored by a fit on the MLP's input (`mame_sd.core.restore`).
- `block_keep`: each transformer block computes a share of the image's tokens, with the keys and
  values of all tokens. The fit is made on the block's normalised input, and the change that the
  block makes is restored.

A block runs on all tokens. Its MLP, its cross-attention, its projection of attention's output and
the queries of its self-attention are computed on the rows of the chosen tokens alone. The other
rows are zero, and `BlockHook` restores them when the block is done. So any block is right whose
other operations treat each token by itself. `Family.blocks` says which blocks do not.

A block tells the modules in it which rows to compute by a `RowsMode` on PyTorch's stack of function
modes, which belongs to the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.compat import outside_old_graphs
from mame_sd.config import MaMeConfig
from mame_sd.core.intercept import running_job
from mame_sd.core.min_tokens import too_little_work
from mame_sd.core.restore import ChosenTokens, cells_and_count, choose_tokens, restored_by
from mame_sd.diffusion.context import HandleState, Tokens
from mame_sd.diffusion.families.family import Family
from mame_sd.diffusion.hook_registry import is_hooked
from mame_sd.diffusion.layer import LayerHook, MergedForward
from mame_sd.diffusion.rows import (
    FusedMLPMode,
    Rows,
    RowsMode,
    image_start,
    needs_all_rows,
    running_fused_mlp,
    running_rows,
)
from mame_sd.report import LayerStats

_MLP = re.compile("FeedForward|SwiGLU|MLP$")  # of a class's name
_OTHERS = ("context", "txt", "text", "audio", "ff_t")  # in names of MLPs of other tokens
# Children of a block that are linear maps of its tokens, where MLP and attention are fused.
_FUSED = ("proj_mlp", "proj_out", "gate_proj", "up_proj", "down_proj")
_OUTPUT = ("to_out.0", "to_out")  # the projection of attention's output, in the attention
# Hooks of diffusers that don't change a module's output.
_HARMLESS = ("group_offloading", "layerwise_casting", "layer_execution_tracker", "lazy_prefetch")
# Arguments of a cross-attention that have an entry for each of the image's tokens.
_BY_TOKEN = ("image_rotary_emb", "query_rotary_emb", "rotary_emb", "ip_adapter_masks")
CACHED = "a cache keeps outputs of its modules, which would be of other tokens"
SEVERAL = "one self-attention follows another"
GATED = "a gated self-attention (GLIGEN's fuser) follows another one"
BY_TOKEN = "its tokens have several timesteps, which a fit on the tokens can't know"
NOT_PLAIN = "its projection of queries, keys and MLP has a LoRA or is quantised"
REPLACED = "another tool has replaced or hooked its projection, as a LoRA added later"
AS_MANY = "its text has as many tokens as the image"


class RestoreHook(LayerHook):
    """Base of the hooks on MLPs, blocks and parts of blocks.

    Args:
        shared, stats, layouts, number: see `LayerHook`.
        family: the family of the model.

    Attributes:
        never: reason why the module can't be restored in any call. Empty if it can.
    """

    name = "mame_restore"
    never = ""
    OTHER = "its tokens are not the image's"
    keep_of: str  # the setting that says how much is computed
    for_mlps = False  # whether restoring an MLP needs this hook

    def __init__(
        self, shared: HandleState, stats: LayerStats, layouts: Any, number: int, family: Family
    ) -> None:
        super().__init__(shared, stats, layouts, number)
        self.family = family

    def put(self, module: nn.Module, inner: Callable[..., Any]) -> Any:
        """Return the function that replaces `inner`, the own forward of a module."""
        self.entry = RestoringForward(module, self, inner).forward
        return self.entry

    def call(self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the module for these arguments."""
        raise NotImplementedError

    @property
    def config(self) -> MaMeConfig | None:
        """Return the settings of this layer in this call, or None if nothing is restored."""
        setting = self.setting
        if not setting.active or "keys" not in setting.methods:
            return None
        if not setting.of_layer:  # a name would be a constant of each compiled block
            return setting.config
        return setting.of_layer.get(self.stats.name, setting.config)

    def choose(self, x: Tensor, config: MaMeConfig, tokens: Tokens) -> ChosenTokens:
        """Choose among the image's tokens x [B, L, C]."""
        keep: float = getattr(config, self.keep_of)
        cells, count = cells_and_count(tokens.size, keep, config.seed, x.device)
        step = self.step()
        leader = step.leader if config.share_guidance_plan else None
        return choose_tokens(x, cells, count, step.draw if config.redraw else None, leader)

    def too_few(self, tokens: Tokens, x: Tensor, config: MaMeConfig) -> str:
        """Return why a call with so few tokens isn't restored. Empty if it is."""
        if config.min_tokens is None:
            return too_little_work(x, tokens.count)
        few = tokens.count < config.min_tokens
        return f"fewer than min_tokens={config.min_tokens}" if few else ""

    def reason(self, x: Any) -> str | Tokens:
        """Return the layout of the tokens of an input x, or why it isn't restored."""
        layout = self.layout()
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
            return "input is no tokens [B, L, C]"
        if layout is None or layout.unknown:
            return "height and width unknown" if layout is None else layout.unknown
        return self.OTHER if self.start(layout, x) is None else layout

    def left_alone(self, reason: str, x: Any) -> None:
        """Count a call with an input x that is not restored.

        The same module may be called with the text too, which says nothing about the image.
        """
        if reason != self.OTHER or not self.stats.sums.eager[0]:
            count = x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else 0
            self.stats.skipped(reason, count)

    def start(self, tokens: Tokens, x: Tensor) -> int | None:
        """Return the position of the image's first token in the input, or None if it has none."""
        return image_start(tokens, x)


class RestoringForward(MergedForward):
    """Replace the `forward` of a module that has a RestoreHook, in copies of the module too."""

    hook: Any

    @outside_old_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, restored if the hook can restore it."""
        if self.hook is None:
            return self.inner(*args, **kwargs)
        return self.hook.call(self, args, kwargs)


class MLPHook(RestoreHook):
    """Compute an MLP on a few tokens, and restore all others."""

    keep_of = "mlp_share"
    for_mlps = True

    def start(self, tokens: Tokens, x: Tensor) -> int | None:
        """See `RestoreHook`. Text that joins the image comes in the order of its attention."""
        start, others = image_start(tokens, x), x.shape[1] - tokens.count
        if self.family.shared_mlp:
            return start if others == 0 else None
        if start is None and others > 0 and (tokens.before, tokens.after) == (0, 0):
            start = {"first": others, "last": 0}.get(self.family.joint or "")
        return start

    def call(self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `RestoreHook`."""
        rows, config = running_rows(), self.config
        if rows is None and (config is None or config.mlp_share == 1):
            return entry.inner(*args, **kwargs)
        name, x = _first(args, kwargs)
        turned = self.family.sequence_first and isinstance(x, Tensor) and x.dim() == 3
        x = x.transpose(0, 1) if turned else x

        def fn(t: Tensor) -> Any:
            return _run(entry.inner, args, kwargs, name, t.transpose(0, 1) if turned else t)

        def of_tokens(t: Tensor) -> Tensor:
            y: Tensor = fn(t)
            return y.transpose(0, 1) if turned else y

        if rows is not None:
            begin = self.start(rows.tokens, x) if isinstance(x, Tensor) and x.dim() == 3 else None
            part = None if begin is None else rows.take(x, begin)
            return fn(x) if part is None else rows.put(of_tokens(part), x, begin)
        assert config is not None
        tokens = self.reason(x)
        if isinstance(tokens, Tokens):
            tokens = self.never or self.too_few(tokens, x, config) or tokens
        if isinstance(tokens, str):
            self.left_alone(tokens, x)
            return entry.inner(*args, **kwargs)
        start = self.start(tokens, x) or 0
        chosen = self.choose(x[:, start : start + tokens.count], config, tokens)
        y = restored_by(chosen, of_tokens, x, start)
        self.stats.merged((chosen,), tokens.size)
        return y.transpose(0, 1) if turned else y


class PartHook(RestoreHook):
    """Compute a part of a block (its cross-attention, a projection) on the block's rows alone."""

    def call(self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `RestoreHook`."""
        rows = running_rows()
        by_token = any(kwargs.get(name) is not None for name in _BY_TOKEN)
        mask = kwargs.get("attention_mask")
        by_token = by_token or (isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-2] > 1)
        if rows is None or by_token or needs_all_rows(entry.module):
            return entry.inner(*args, **kwargs)
        name, x = _first(args, kwargs)
        part = rows.take(x) if isinstance(x, Tensor) and x.dim() == 3 else None
        if part is None:
            return entry.inner(*args, **kwargs)
        y = _run(entry.inner, args, kwargs, name, part)
        fits = isinstance(y, Tensor) and y.shape[:2] == part.shape[:2] and y.dim() == 3
        return rows.put(y, x) if fits else entry.inner(*args, **kwargs)


class FusedInHook(PartHook):
    """Compute the projection into an MLP that shares its projection out with the attention.

    FLUX's single-stream blocks compute `proj_out([attention | act(proj_mlp(x))])`. Flux 2 has one
    projection for queries, keys, values and the MLP, too. The MLP's columns are computed on a few
    tokens; all others get zeros, which `FusedOutHook` does not read.

    Attributes:
        ahead: number of columns ahead of the MLP's, which are computed on all tokens.
    """

    keep_of = "mlp_share"
    for_mlps = True
    ahead = 0

    def call(self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `RestoreHook`."""
        running, config, inner = running_fused_mlp(), self.config, entry.inner
        if running is None or config is None or running_rows() is not None:
            return inner(*args, **kwargs) if self.ahead else super().call(entry, args, kwargs)
        name, x = _first(args, kwargs)
        tokens = self.reason(x)
        if isinstance(tokens, Tokens):
            fused = NOT_PLAIN if self.ahead and not _is_plain(entry) else ""
            tokens = self.never or fused or self.too_few(tokens, x, config) or tokens
        if isinstance(tokens, str):
            self.left_alone(tokens, x)
            return inner(*args, **kwargs)
        start = self.start(tokens, x) or 0
        chosen = self.choose(x[:, start : start + tokens.count], config, tokens)
        running.rows = rows = Rows(chosen, tokens)
        part = rows.take(x, start)
        assert part is not None
        self.stats.merged((chosen,), tokens.size)
        if not self.ahead:
            return rows.put(_run(inner, args, kwargs, name, part), x, start)
        linear: Any = entry.module
        weight, bias = linear.weight, linear.bias
        biases = (None, None) if bias is None else (bias[: self.ahead], bias[self.ahead :])
        y = F.linear(x, weight[: self.ahead], biases[0])
        mlp = rows.put(F.linear(part, weight[self.ahead :], biases[1]), x, start)
        return torch.cat([y, mlp], -1)


class FusedOutHook(PartHook):
    """Compute `proj_out([attention | mlp])`, where the MLP was computed on a few tokens.

    The projection is linear: the attention's columns are computed on all tokens, the MLP's on the
    chosen ones, and their output is restored.
    """

    for_mlps = True

    def call(self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `RestoreHook`."""
        running = running_fused_mlp()
        if running is None or running.rows is None:
            return super().call(entry, args, kwargs)
        (rows, running.rows), (name, x) = (running.rows, None), _first(args, kwargs)
        linear: Any = entry.module
        width: int = linear.out_features  # of the attention's output, too
        part = rows.take(x)
        assert part is not None
        if _is_plain(entry):
            y = F.linear(x[..., :width], linear.weight[:, :width], linear.bias)
            f = F.linear(part[..., width:], linear.weight[:, width:])
        else:  # a LoRA, or quantised weights: any linear map
            attention = F.pad(x[..., :width], (0, x.shape[-1] - width))
            y = _run(entry.inner, args, kwargs, name, attention)
            f = _run(entry.inner, args, kwargs, name, part) - rows.take(y)
        return y + rows.restore(f)


def _is_plain(entry: MergedForward) -> bool:
    """Return True if a module multiplies by its `weight`, adds its `bias`, and does no more."""
    weight = getattr(entry.module, "weight", None)
    forward = getattr(entry.inner, "__func__", None)
    return forward is nn.Linear.forward and type(weight) in (Tensor, nn.Parameter)


class QueryHook(PartHook):
    """Compute the queries of a self-attention on the block's rows alone, unless its keys merge.

    Merged values are fitted to queries of any tokens.
    """

    def call(self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `RestoreHook`."""
        job = running_job()
        if job is not None and job.merges:
            return entry.inner(*args, **kwargs)
        return super().call(entry, args, kwargs)


class CrossAttentionHook(PartHook):
    """Compute a cross-attention on the block's rows alone.

    If it is called without a text, it is a second self-attention, which needs all rows
    (`Rows.mixed`).
    """

    def call(self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `RestoreHook`."""
        rows, (name, _) = running_rows(), _first(args, kwargs)
        others = (*args[1:], *(value for of, value in kwargs.items() if of != name))
        if rows is not None and not any(isinstance(t, Tensor | tuple | list) for t in others):
            rows.mixed = True
            return entry.inner(*args, **kwargs)
        return super().call(entry, args, kwargs)


class BlockHook(RestoreHook):
    """Compute a block on a few tokens, with the keys of all, and restore the change it makes."""

    keep_of = "block_share"
    # The hook on the projection into an MLP that shares projections with the attention, the path
    # of that projection in the block and the path of the one out of both.
    fused: tuple[RestoreHook, str, str] | None = None

    def call(self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `RestoreHook`."""
        config = self.config
        if running_rows() is not None:
            return entry.inner(*args, **kwargs)
        if config is None or config.block_share == 1:
            return self._with_all_rows(entry, args, kwargs)
        _, x = _first(args, kwargs)
        tokens = self.reason(x)
        if isinstance(tokens, Tokens):
            tokens = (
                self.never
                or (GATED if _has_fuser(entry.module) else "")
                or self.too_few(tokens, x, config)
                or (CACHED if self._is_cached(entry.module) else "")
                or ("a skip connection" if kwargs.get("skip") is not None else "")
                or (BY_TOKEN if tokens.timesteps else "")
                or (AS_MANY if self.family.joint and _twice(x, args, kwargs) else "")
                or tokens
            )
        if isinstance(tokens, str):
            self.left_alone(tokens, x)
            return self._with_all_rows(entry, args, kwargs)
        start = self.start(tokens, x) or 0
        end = start + tokens.count
        image = x[:, start:end]
        chosen = self.choose(F.layer_norm(image, image.shape[-1:]), config, tokens)
        rows = Rows(chosen, tokens)
        with RowsMode(rows):
            output = entry.inner(*args, **kwargs)
        if rows.mixed:
            self.stats.skipped(SEVERAL, x.shape[1])
            return entry.inner(*args, **kwargs)
        alone = isinstance(output, Tensor)
        outputs = [output] if alone else list(output)
        at = [i for i, y in enumerate(outputs) if isinstance(y, Tensor) and y.shape == x.shape]
        if len(at) != 1:
            reason = f"{len(at)} of its outputs have the shape of its tokens"
            self.stats.skipped(reason, x.shape[1])
            if not torch.compiler.is_compiling():  # don't compute later calls twice
                self.never = reason
            return entry.inner(*args, **kwargs)
        y = outputs[at[0]]
        change = chosen.take(y[:, start:end]) - chosen.take(image)
        restored = image + chosen.restore(change)
        if y.shape[1] > tokens.count:
            restored = torch.cat([y[:, :start], restored, y[:, end:]], 1)
        outputs[at[0]] = restored
        self.stats.merged((chosen,), tokens.size)
        return restored if alone else type(output)(outputs)

    def _with_all_rows(
        self, entry: MergedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute the block on all tokens, but for an MLP that is restored."""
        if self.fused is None:
            return entry.inner(*args, **kwargs)
        hook, *paths = self.fused
        config = hook.config
        if config is None or config.mlp_share == 1:
            return entry.inner(*args, **kwargs)
        into, out = (_at(entry.module, path) for path in paths)
        # A LoRA added later may wrap the projection in: the computed rows stay right.
        hooked = is_hooked(into) or is_hooked(getattr(into, "base_layer", None))
        reason = "" if hooked and is_hooked(out) and _is_outermost(out) else REPLACED
        if not reason and any(map(_has_cache, (into, out))):
            reason = CACHED
        if not reason:
            with FusedMLPMode() as running:
                output = entry.inner(*args, **kwargs)
            if running.rows is None:
                return output
            reason = REPLACED  # nothing took the rows: another module projected out
            if not torch.compiler.is_compiling():
                hook.never = reason
        hook.left_alone(reason, _first(args, kwargs)[1])
        return entry.inner(*args, **kwargs)

    def _is_cached(self, block: nn.Module) -> bool:
        """Return True if a hook of diffusers may keep what a module of the block gave."""
        return any(_has_cache(module) for module in block.modules() if module is not block)


def _has_cache(module: nn.Module | None) -> bool:
    """Return True if a hook of diffusers may keep what a module gave."""
    registry = getattr(module, "_diffusers_hook", None)
    return registry is not None and any(not name.startswith(_HARMLESS) for name in registry.hooks)


def _is_outermost(module: nn.Module | None) -> bool:
    """Return True if nothing but offloading is around the hook on a module.

    A LoRA that another tool puts around the module would read zeros for tokens that are not chosen.
    """
    if module is None or torch.compiler.is_compiling():
        return module is not None
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    around = vars(module).get("forward")
    own = isinstance(getattr(around, "__self__", None), RestoringForward)
    return own or hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")


def _has_fuser(block: nn.Module) -> bool:
    """Return True if a block of GLIGEN attends to boxes after its self-attention."""
    fuser = getattr(block, "fuser", None)
    return fuser is not None and getattr(fuser, "enabled", True)


def _twice(x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a block is called with another tensor of the shape of its tokens x."""
    given = (*args, *kwargs.values())
    return any(isinstance(t, Tensor) and t is not x and t.shape == x.shape for t in given)


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Return the name of the argument that holds a module's tokens, and the tokens.

    The name is None if they were passed by position.
    """
    if args:
        return None, args[0]
    for name in ("hidden_states", "x", "hidden_state", *kwargs):
        if isinstance(kwargs.get(name), Tensor):
            return name, kwargs[name]
    return None, None


def _run(
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str | None,
    x: Tensor,
) -> Any:
    """Call `inner` with x instead of its tokens, which `_first` found."""
    return inner(x, *args[1:], **kwargs) if name is None else inner(*args, **{**kwargs, name: x})


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
        for name, part, kind in _parts_of(block, modules):
            path = f"{outer}.{name}" if outer else name
            stats = LayerStats(path, hook.stats.device, "mlp")
            part_hook = kind(shared, stats, hook.layouts, number, family)
            if isinstance(part_hook, FusedInHook):
                owner = name.rpartition(".")[0]  # the attention, in Flux 2
                if owner:
                    shared_by: Any = block.get_submodule(owner)
                    part_hook.ahead = 3 * shared_by.inner_dim
                fused = part_hook, name, f"{owner}.to_out" if owner else "proj_out"
            yield path, part, part_hook
        if outer:
            stats = LayerStats(outer, hook.stats.device, "block")
            own = BlockHook(shared, stats, hook.layouts, number, family)
            several = len(paths) > 1 and not family.parallel
            gated = outer.endswith(".fuser")
            own.fused, own.for_mlps = fused, fused is not None
            own.never = family.blocks or (SEVERAL if several else GATED if gated else "")
            yield outer, block, own


def _parts_of(
    block: nn.Module, attention: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, type[RestoreHook]]]:
    """Yield the modules of a block that treat each token by itself.

    Yields:
        The path in the block, the module, and the class of its hook.
    """
    for name, child in block.named_children():
        kinds = [kind.__name__ for kind in type(child).__mro__]  # a tool's subclass, too
        if child in attention:
            fused = _at(child, "to_qkv_mlp_proj")
            out = _at(child, "to_out")
            columns: Any = getattr(child, "inner_dim", 0)
            if fused and out and _share_projection(fused, out, 3 * columns):
                yield f"{name}.to_qkv_mlp_proj", fused, FusedInHook
                yield f"{name}.to_out", out, FusedOutHook
                continue
            queries = _at(child, "to_q")
            if queries is not None:
                yield f"{name}.to_q", queries, QueryHook
            for path in _OUTPUT:
                part = _at(child, path)
                if part is not None and not isinstance(part, nn.ModuleList):
                    yield f"{name}.{path}", part, PartHook
                    break
        elif any(map(_MLP.search, kinds)) and not any(other in name for other in _OTHERS):
            yield name, child, MLPHook
        elif name in ("proj_mlp", "proj_out") and _share_projection(
            _at(block, "proj_mlp"), _at(block, "proj_out")
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


def _at(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None
