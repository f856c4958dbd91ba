"""Hold the state that the merged blocks of a model share: settings, and the running forward.

A forward belongs to its thread, so that several threads may run one model at once. Changes that
affect all of them (applying, removing, new settings) are refused while another thread is in a
forward.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.compat import IMPLEMENTATION, outside_old_graphs, parameters_of
from mame_sd.core.paper import Plan
from mame_sd.perception.encoder_registry import Encoder
from mame_sd.perception.hooks import HookOwner, InnerHook
from mame_sd.perception.plans import GroupPlan
from mame_sd.perception.report import CONVOLUTIONS

_ATTENTION = (None, "eager", "sdpa")  # implementations that add a mask of numbers to the logits


@dataclass
class Forward:
    """What the blocks know of the forward that runs in one thread, or that ran last in it."""

    # (h, w) of the images' patches, of a video's frames one under the other; None if unknown.
    grid: tuple[int, int] | None = None
    sizes: Tensor | None = None  # [B, L'] number of tokens that each stands for; None: 1 each
    sized: bool = False  # proportional attention is on
    dense: bool = False  # each block returns all tokens, and passes the merged ones on in `whole`
    # The latest block's output [B, L, C], and its merged tokens [B, L', C].
    whole: tuple[Tensor, Tensor] | None = None
    plans: dict[int, Plan | GroupPlan] = field(default_factory=dict)  # by number of block
    # Keys [B, L, d] by number of block, until the block compares them.
    keys: dict[int, Tensor] = field(default_factory=dict)
    unmasked: bool = False  # the model got no mask, so a mask that blocks get hides nothing
    counting: bool = False  # the running block counts; False when a checkpoint recomputes it


class ForwardState(HookOwner):
    """State that the blocks of one model share.

    Attributes:
        last: index of the last block.
        inner: the hook on the convolution that makes patches, if there is one.
        restore: True if the last block's output has all tokens again.
        dense: True if every block's output has all tokens again, for heads that read it.
        prop_attn: if True, the log of each token's size is added to its attention logits, and means
            are weighted by size. If None, wherever the model supports it, which each forward finds
            out.
        active: if False, every call is bit-equal to the model without merging.
        capture: if True, plans are kept after the forward.
        patches: number of patches that the convolution made in its latest call.
        running: threads that are in a forward of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: Encoder,
        blocks: list[nn.Module],
        restore: bool,
        prop_attn: bool | None,
    ) -> None:
        self.model, self.spec, self.last = model, spec, len(blocks) - 1
        self.num_prefix_tokens, self.dense = spec.prefix_tokens_of(model), spec.dense
        self.restore, self.prop_attn = restore, prop_attn
        self.active, self.capture = True, False
        self.patches, self.shared = 0, self
        patching = _patching(model, blocks)
        self.inner = [InnerHook(self, model, path, self.note_grid) for path in patching]
        self._names = list(parameters_of(type(model)))
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the forwards: a copy starts without any."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_threads", "running")}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._threads = threading.local()
        self.running: set[int] = set()

    @property
    def now(self) -> Forward:
        """Return the forward of this thread."""
        forward: Forward | None = getattr(self._threads, "forward", None)
        if forward is None:
            forward = self._threads.forward = Forward()
        return forward

    @outside_old_graphs
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a call of the model before its forward.

        Raises:
            RuntimeError: a replica, a trace or a replaced inner module can't merge.
            ValueError: the images are padded.
        """
        if not torch.compiler.is_compiling():
            self.running.add(threading.get_ident())
        for hook in self.inner:
            hook.follow()
        if not self.active:
            return
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "expected one device, got a replica of torch.nn.DataParallel, whose blocks would"
                " compute with the first device's weights; take DistributedDataParallel, or call"
                " remove_mame first"
            )
        if torch.jit.is_tracing():
            raise RuntimeError(
                "expected torch.export of a merged model, got torch.jit.trace, which fixes what one"
                " image's tokens merged to; take torch.export, or call remove_mame first"
            )
        call = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if call.get("pixel_attention_mask") is not None:
            raise ValueError(
                "pixel_attention_mask: expected none, got one: tokens of images that are padded"
                " can't merge. Leave it out for images of one resolution that fill all patches"
            )
        self.now.unmasked = call.get(self.spec.mask) is None

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the model's forward has returned or raised."""
        self.now.unmasked = False
        if not torch.compiler.is_compiling():
            self.running.discard(threading.get_ident())

    def note_grid(self, output: Tensor) -> None:
        """Note the grid of patches [B, C, h, w], or [B, C, t, h, w] of clips."""
        self.patches = math.prod(output.shape[2:])
        self.now.grid = math.prod(output.shape[2:-1]), output.shape[-1]

    @property
    def capturing(self) -> bool:
        """Return True if what runs now is kept after the forward."""
        return self.capture and not torch.compiler.is_compiling()

    def begin(self) -> Forward:
        """Begin a forward at its first merging block, and drop the state of the previous one.

        Raise an error if proportional attention is required but impossible, whole blocks are
        checkpointed, or the patch embedding was replaced, so that the grid is unknown.
        """
        for hook in self.inner:
            hook.follow(late=True)
        now, reason = self.now, no_sizes(self.model)
        if reason and self.prop_attn:
            raise ValueError(reason)
        now.sized = self.prop_attn is not False and not reason
        if self.model.training and checkpoints_around(self.model):
            raise ValueError(
                "expected no checkpointing around blocks (timm, transformers before 5.23), which"
                " computes them again without the sizes and places of their tokens, got it; switch"
                " it off, or call remove_mame"
            )
        now.sizes, now.plans, now.keys, now.whole = None, {}, {}, None
        return now

    def keep(self, number: int, plan: Plan | GroupPlan) -> None:
        """Store the plan of block `number` if something will need it."""
        now = self.now
        if self.restore or self.dense or now.dense or self.capturing:
            now.plans[number] = plan

    def restored(self, tokens: Tensor) -> Tensor:
        """Restore tokens [B, L', C] of the latest block to [B, L, C] by all plans so far."""
        plans = self.now.plans
        for number in sorted(plans, reverse=True):
            tokens = plans[number].restore(tokens)
        return tokens

    def drop_plans(self) -> None:
        """Drop plans that nothing will need."""
        if not self.capture:
            self.now.plans = {}

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError if another thread is in a forward of the model."""
        if self.running - {threading.get_ident()}:
            raise RuntimeError(
                f"{what}: expected no other thread in a forward of {type(self.model).__name__}, got"
                " one, whose blocks would merge in two ways; wait for it"
            )


class FeatureMaps(HookOwner):
    """Replace a method of the model that returns feature maps of several blocks.

    During such a call every block returns all tokens.
    """

    def __init__(self, shared: ForwardState, name: str) -> None:
        self.shared, self.name = shared, name

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own method."""
        model, now = self.shared.model, self.shared.now
        outer, now.dense = now.dense, True
        try:
            return getattr(type(model), self.name)(model, *args, **kwargs)
        finally:
            now.dense, now.whole = outer, None
            self.shared.drop_plans()


def no_sizes(model: Any) -> str:
    """Return why attention of `model` can't use token sizes as it is set now; empty if it can."""
    kind = getattr(getattr(model, "config", None), IMPLEMENTATION, None)
    if kind not in _ATTENTION:
        return (
            f"prop_attn: expected attention implementation 'eager' or 'sdpa', got {kind!r}; set one"
            " of these, or leave sizes out by prop_attn=False"
        )
    return ""


def checkpoints_around(model: Any) -> bool:
    """Return True if gradient checkpointing wraps whole blocks, not code inside their calls."""
    return getattr(model, "grad_checkpointing", False) or any(  # timm; transformers < 5.23
        getattr(block, "gradient_checkpointing", False)
        and type(block).__call__ is not nn.Module.__call__
        for block in model.modules()
    )


def _patching(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    """Return the path of the last convolution before the blocks, or of the first if all follow."""
    inside = {part for block in blocks for part in block.modules()}
    paths: list[str] = []
    for path, module in model.named_modules():
        if module is blocks[0] and paths:
            return paths[-1:]
        if isinstance(module, CONVOLUTIONS) and module not in inside:
            paths.append(path)
    return paths[:1]
