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
modes, which belongs to the call. `restored_modules.py` finds the modules. MLPs that share
projections with the attention are in `fused_mlp.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.compat import outside_old_graphs
from mame_sd.config import MaMeConfig
from mame_sd.core.cells import Cells
from mame_sd.core.groups import all_text, equal_at_end
from mame_sd.core.intercept import running_job
from mame_sd.core.min_tokens import too_little_work
from mame_sd.core.restore import (
    Chosen,
    ChosenOfImages,
    ChosenTokens,
    cells_and_count,
    choose_tokens,
    restored_by,
)
from mame_sd.diffusion.context import HandleState, Tokens
from mame_sd.diffusion.families.family import Family
from mame_sd.diffusion.layer import LayerHook, LayerStats, MergedForward
from mame_sd.diffusion.rows import Rows, RowsMode, image_start, needs_all_rows, running_rows
from mame_sd.report import counted

# Hooks of diffusers that don't change a module's output.
_HARMLESS = ("group_offloading", "layerwise_casting", "layer_execution_tracker", "lazy_prefetch")
# Arguments of a cross-attention that have an entry for each of the image's tokens.
_BY_TOKEN = ("image_rotary_emb", "query_rotary_emb", "rotary_emb", "ip_adapter_masks")
CACHED = "a cache keeps outputs of its modules, which would be of other tokens"
SEVERAL = "one self-attention follows another"
GATED = "a gated self-attention (GLIGEN's fuser) follows another one"
BY_TOKEN = "its tokens have several timesteps, which a fit on the tokens can't know"
AS_MANY = "its text has as many tokens as the image"


class TokensCall(NamedTuple):
    """Describe one call of a module with tokens, whose own forward is `forward`.

    Attributes:
        name: name of the argument that holds the tokens. If None, the first positional one does.
        x: the tokens [B, L, C], or anything else in a call that can't be restored.
    """

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str | None
    x: Any

    def run(self, x: Tensor | None = None) -> Any:
        """Return the module's own output. If x is given, for x instead of the call's tokens."""
        if x is None:
            return self.forward(*self.args, **self.kwargs)
        if self.name is None:
            return self.forward(x, *self.args[1:], **self.kwargs)
        return self.forward(*self.args, **{**self.kwargs, self.name: x})

    @property
    def others(self) -> tuple[Any, ...]:
        """Return all arguments but the tokens."""
        named = (value for name, value in self.kwargs.items() if name != self.name)
        return (*self.args[1:], *named)


class RestoringForward(MergedForward):
    """Replace the `forward` of a module that has a RestoreHook, in copies of the module too."""

    hook: Any

    @outside_old_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, restored if the hook can restore it."""
        if self.hook is None:
            return self.inner(*args, **kwargs)
        name, x = (None, args[0]) if args else _named_tokens(kwargs)
        output: Any = self.hook.output(TokensCall(self.module, self.inner, args, kwargs, name, x))
        return output


def _named_tokens(kwargs: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Return the name and value of the argument that holds a module's tokens, or (None, None)."""
    for name in ("hidden_states", "x", "hidden_state", *kwargs):
        if isinstance(kwargs.get(name), Tensor):
            return name, kwargs[name]
    return None, None


class RestoreHook(LayerHook):
    """Base of the hooks on MLPs, blocks and parts of blocks.

    Args:
        shared, stats, layouts, number: see `LayerHook`.
        family: the family of the model.

    Attributes:
        never: reason why the module can't be restored in any call. Empty if it can.
        keep_of: the setting that says which share is computed. Empty for parts of blocks.
        for_mlps: True if restoring an MLP needs this hook.
        of_references: True if tokens of reference images are restored too.
    """

    name = "mame_restore"
    replacement = RestoringForward
    never = ""
    keep_of = ""
    for_mlps = False
    of_references = False
    OTHER = "its tokens are not the image's"

    def __init__(
        self, shared: HandleState, stats: LayerStats, layouts: Any, number: int, family: Family
    ) -> None:
        super().__init__(shared, stats, layouts, number)
        self.family = family

    def output(self, call: TokensCall) -> Any:
        """Return the output of the module in a call."""
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

    def chosen(
        self, call: TokensCall, x: Any, config: MaMeConfig
    ) -> tuple[Chosen, Tokens, int] | None:
        """Choose the tokens that are computed, or count a call that is not restored.

        Args:
            call: the call.
            x: its tokens [B, L, C].
            config: the settings.

        Returns:
            The chosen tokens, the layout and the position of the image's first token in x; or None
            if the call is not restored.
        """
        tokens = self.reason(x)
        if isinstance(tokens, Tokens):
            few = self.never or self.too_few(tokens.count, x, config)
            tokens = few or self.refused(call, tokens) or tokens
        if isinstance(tokens, str):
            self.left_alone(tokens, x)
            return None
        start = self.start(tokens, x) or 0
        sizes = [tokens.size, *self.references(tokens, x, start, config)]
        chosen, end = [], start
        for size in sizes:
            begin, end = end, end + math.prod(size)
            chosen.append(self.choose(self.features(x[:, begin:end]), config, size))
        return chosen[0] if len(chosen) == 1 else ChosenOfImages(chosen), tokens, start

    def references(
        self, tokens: Tokens, x: Tensor, start: int, config: MaMeConfig
    ) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of the reference images in an input x that are restored too.

        `tokens` is the layout of x, and `start` the position of the image's first token in x.
        """
        sizes = tokens.references if self.of_references and config.references != 1 else ()
        counts = [*map(math.prod, sizes)]
        if x.shape[1] < start + tokens.count + sum(counts):
            return ()
        return () if any(self.too_few(count, x, config) for count in counts) else sizes

    def choose(self, x: Tensor, config: MaMeConfig, size: tuple[int, ...]) -> ChosenTokens:
        """Choose among the tokens x [B, L, C] of an image whose `size` is (h, w) or (t, h, w)."""
        # Compiled regions estimate nothing.
        estimating = None if torch.compiler.is_compiling() else self.shared.estimating.value
        on_error = None
        if estimating is not None:
            estimating.add(self.stats.name)
            on_error = self.stats.errors.add
        return choose_tokens(x, *self.choice(x, config, size), on_error)

    def choice(
        self, x: Tensor, config: MaMeConfig, size: tuple[int, ...]
    ) -> tuple[Cells, int, Tensor | None, Tensor | None]:
        """Return the cells, count, draw and leader for `choose_tokens`; arguments as `choose`."""
        keep: float = getattr(config, self.keep_of)
        step = self.step()
        leader = step.leader if config.share_guidance_plan else None
        draw = step.draw if config.redraw else None
        return *cells_and_count(size, keep, config.seed, x.device), draw, leader

    def features(self, image: Tensor) -> Tensor:
        """Return the features [B, L, C] of the image's tokens that the fit is made on."""
        return image

    def too_few(self, count: int, x: Tensor, config: MaMeConfig) -> str:
        """Return why an image of `count` tokens in an input x isn't restored. Empty if it is."""
        if config.min_tokens is None:
            return too_little_work(x, count)
        few = count < config.min_tokens
        return f"fewer than min_tokens={config.min_tokens}" if few else ""

    def refused(self, call: TokensCall, tokens: Tokens) -> str:
        """Return why this kind of module can't be restored in a call. Empty if it can."""
        return ""

    def reason(self, x: Any) -> str | Tokens:
        """Return the layout of the tokens of an input x, or why it isn't restored."""
        layout = self.layout()
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
            return "input is not tokens [B, L, C]"
        if layout is None or layout.unknown:
            return "height and width unknown" if layout is None else layout.unknown
        return self.OTHER if self.start(layout, x) is None else layout

    def merged(self, chosen: Chosen, tokens: Tokens) -> None:
        """Count a call that was restored from chosen tokens."""
        others = len(chosen.images) - 1 if isinstance(chosen, ChosenOfImages) else 0
        note = f"tokens of {counted(others, 'reference image')} too" if others else ""
        self.stats.merged((chosen,), tokens.size, note)

    def left_alone(self, reason: str, x: Any) -> None:
        """Count a call with an input x that is not restored.

        The same module may be called with the text too, which says nothing about the image.
        """
        if reason != self.OTHER or not self.stats.calls:
            count = x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else 0
            self.stats.skipped(reason, count)

    def start(self, tokens: Tokens, x: Tensor) -> int | None:
        """Return the position of the image's first token in the input, or None if it has none."""
        return image_start(tokens, x)


class MLPHook(RestoreHook):
    """Compute an MLP on a few tokens, and restore all others."""

    keep_of = "mlp_share"
    for_mlps = True
    of_references = True

    def start(self, tokens: Tokens, x: Tensor) -> int | None:
        """See `RestoreHook`. Text that joins the image comes in the order of its attention."""
        start, others = image_start(tokens, x), x.shape[1] - tokens.count
        if self.family.shared_mlp:
            return start if others == 0 else None
        if start is None and others > 0 and (tokens.before, tokens.after) == (0, 0):
            start = {"first": others, "last": 0}.get(self.family.joint or "")
        return start

    def output(self, call: TokensCall) -> Any:
        """See `RestoreHook`."""
        rows, config = running_rows(), self.config
        if rows is not None:
            x = call.x
            start = self.start(rows.tokens, x) if isinstance(x, Tensor) and x.dim() == 3 else None
            part = None if start is None else rows.take(x, start)
            return call.run() if part is None else rows.put(call.run(part), x, start)
        if config is None or config.mlp_share == 1:
            return call.run()
        turned = self.family.sequence_first and isinstance(call.x, Tensor) and call.x.dim() == 3
        x = call.x.transpose(0, 1) if turned else call.x
        if (choice := self.chosen(call, x, config)) is None:
            return call.run()
        chosen, tokens, start = choice

        def of_tokens(t: Tensor) -> Any:
            return call.run(t.transpose(0, 1)).transpose(0, 1) if turned else call.run(t)

        y = restored_by(chosen, of_tokens, x, start)
        self.merged(chosen, tokens)
        return y.transpose(0, 1) if turned else y


class TextHook(RestoreHook):
    """Compute one of the equal tokens at the end of a text in its MLP."""

    def output(self, call: TokensCall) -> Any:
        """See `RestoreHook`."""
        config = self.config
        unwrapped = getattr(call.forward, "__func__", None) is type(call.module).forward
        wanted = unwrapped and config is not None and config.equal_text
        repeats = equal_at_end(call.x) if wanted else 1
        if repeats == 1:
            return call.run()
        y = call.run(call.x[:, : 1 - repeats])
        self.stats.computed_as_one(call.x.shape[1], repeats)
        return all_text(y, repeats)


class PartHook(RestoreHook):
    """Compute a part of a block (its cross-attention, a projection) on the block's rows alone."""

    def output(self, call: TokensCall) -> Any:
        """See `RestoreHook`."""
        rows = running_rows()
        if rows is None:
            return call.run()
        by_token = any(call.kwargs.get(name) is not None for name in _BY_TOKEN)
        mask = call.kwargs.get("attention_mask")
        by_token = by_token or (isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-2] > 1)
        if by_token or needs_all_rows(call.module):
            return call.run()
        part = rows.take(call.x) if isinstance(call.x, Tensor) and call.x.dim() == 3 else None
        if part is None:
            return call.run()
        y = call.run(part)
        fits = isinstance(y, Tensor) and y.shape[:2] == part.shape[:2] and y.dim() == 3
        return rows.put(y, call.x) if fits else call.run()


class QueryHook(PartHook):
    """Compute the queries of a self-attention on the block's rows alone, unless its keys merge.

    Merged values are fitted to queries of any tokens.
    """

    def output(self, call: TokensCall) -> Any:
        """See `RestoreHook`."""
        job = running_job()
        if job is not None and job.merges:
            return call.run()
        return super().output(call)


class CrossAttentionHook(PartHook):
    """Compute a cross-attention on the block's rows alone.

    If it is called without a text, it is a second self-attention, which needs all rows
    (`Rows.mixed`).
    """

    def output(self, call: TokensCall) -> Any:
        """See `RestoreHook`."""
        rows = running_rows()
        if rows is None or any(isinstance(t, Tensor | tuple | list) for t in call.others):
            return super().output(call)
        rows.mixed = True
        return call.run()


class BlockHook(RestoreHook):
    """Compute a block for a few tokens, which attend to all, and restore what it adds to others.

    Attributes:
        fused: if the MLP shares projections with the attention, the `FusedMLP` that computes the
            block on all tokens but for its MLP.
    """

    keep_of = "block_share"
    fused: Any = None

    def output(self, call: TokensCall) -> Any:
        """See `RestoreHook`."""
        config, choice = self.config, None
        if running_rows() is not None:
            return call.run()
        if config is not None and config.block_share < 1:
            choice = self.chosen(call, call.x, config)
        if choice is None:
            return call.run() if self.fused is None else self.fused.output(call)
        chosen, tokens, start = choice
        activation = None if self.fused is None else self.fused.activation(call)
        rows = Rows(chosen, tokens, activation)
        with RowsMode(rows):
            output = call.run()
        x, end = call.x, start + tokens.count
        alone = isinstance(output, Tensor)
        outputs = [output] if alone else list(output)
        at = [i for i, y in enumerate(outputs) if isinstance(y, Tensor) and y.shape == x.shape]
        if rows.mixed or len(at) != 1:
            reason = f"{len(at)} of its outputs have the shape of its tokens"
            self.stats.skipped(SEVERAL if rows.mixed else reason, x.shape[1])
            if not rows.mixed and not torch.compiler.is_compiling():  # don't compute calls twice
                self.never = reason
            return call.run()
        y, image = outputs[at[0]], x[:, start:end]
        change = chosen.take(y[:, start:end]) - chosen.take(image)
        restored = image + chosen.restore(change)
        if y.shape[1] > tokens.count:
            restored = torch.cat([y[:, :start], restored, y[:, end:]], 1)
        outputs[at[0]] = restored
        self.merged(chosen, tokens)
        return restored if alone else type(output)(outputs)

    def features(self, image: Tensor) -> Tensor:
        """See `RestoreHook`."""
        return F.layer_norm(image, image.shape[-1:])

    def refused(self, call: TokensCall, tokens: Tokens) -> str:
        """See `RestoreHook`."""
        fuser = getattr(call.module, "fuser", None)
        if fuser is not None and getattr(fuser, "enabled", True):
            return GATED
        if any(has_cache(part) for part in call.module.modules() if part is not call.module):
            return CACHED
        if call.kwargs.get("skip") is not None:
            return "a skip connection"
        if tokens.timesteps:
            return BY_TOKEN
        others = [t for t in call.others if isinstance(t, Tensor) and t is not call.x]
        as_many = self.family.joint and any(t.shape == call.x.shape for t in others)
        return AS_MANY if as_many else ""


def has_cache(module: nn.Module | None) -> bool:
    """Return True if a hook of diffusers may keep what a module gave."""
    registry = getattr(module, "_diffusers_hook", None)
    return registry is not None and any(not name.startswith(_HARMLESS) for name in registry.hooks)
