"""What the merged blocks of one model share: settings, and what the forward that runs knows.

A forward belongs to its thread, so that several threads may run one model at once. What changes
the model for all (applying, removing, settings) is refused while another thread is in a forward.
"""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.core.paper import Plan
from mame_sd.perception.counts import CONVOLUTIONS
from mame_sd.perception.hooks import InnerHook, Merging
from mame_sd.perception.known_encoders import Encoder
from mame_sd.perception.plans import GroupPlan
from mame_sd.upstream import outside_old_graphs, parameters_of

_ATTENTION = (None, "eager", "sdpa")  # implementations that add a mask of numbers to the logits


@dataclass
class Forward:
    """What the blocks know of the forward that runs in one thread, or ran last in it."""

    # (h, w) of the images' patches, of a video's frames one under the other; None where unknown.
    grid: tuple[int, int] | None = None
    sizes: Tensor | None = None  # [B, L'] how many tokens each token stands for; None: 1 each
    sized: bool = False  # the log of sizes is added to attention logits, and means count them
    # Blocks may be computed again, whole, after another forward's images (checkpoints around them).
    again: bool = False
    dense: bool = False  # each block gives all tokens, and passes on what is left in `whole`
    # What the latest block gave [B, L, C], and what is left of it [B, L', C].
    whole: tuple[Tensor, Tensor] | None = None
    plans: dict[int, Plan | GroupPlan] = field(default_factory=dict)  # by number of block
    keys: dict[int, Tensor] = field(
        default_factory=dict
    )  # [B, L, d], until the block compares them
    unmasked: bool = False  # the model was called without a mask: one that blocks get hides nothing
    counting: bool = False  # the block that runs counts; not where a checkpoint computes it again
    # What this forward and earlier ones gave, with `capture`.
    given: list[weakref.ref[Tensor]] = field(default_factory=list)
    earlier: list[weakref.ref[Tensor]] = field(default_factory=list)


class ForwardState(Merging):
    """What the blocks of one model share.

    Attributes:
        last: number of its last block.
        inner: the hooks on its convolutions.
        patches: path of the one that cuts patches; None: there is none.
        clips: it cuts clips, not images.
        restore: the blocks' output has every token again.
        dense: what each block gives has every token again, for heads that read it.
        prop_attn: the log of a token's size is added to its attention logits, and means count it;
            None: where that can be, which each forward finds out.
        active: False makes every call bit-equal to a model without merging.
        capture: plans are kept after the forward.
        places: by path in the model, at how many places its convolutions computed last.
        running: threads that are in a forward of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        known: Encoder,
        blocks: list[nn.Module],
        restore: bool,
        prop_attn: bool | None,
    ) -> None:
        self.model, self.known, self.last = model, known, len(blocks) - 1
        self.num_prefix_tokens, self.dense = known.prefix_tokens_of(model), known.dense
        self.restore, self.prop_attn = restore, prop_attn
        self.active, self.capture = True, False
        self.places: dict[str, int] = {}
        self.shared = self
        convolutions, self.patches = _convolutions(model, blocks)
        self.inner = [InnerHook(self, model, path, self.computed) for path in convolutions]
        self.clips = isinstance(model.get_submodule(self.patches or ""), nn.Conv3d)
        self._names = list(parameters_of(type(model)))
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """Copies start without a forward."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_threads", "running")}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._threads = threading.local()
        self.running: set[int] = set()

    @property
    def now(self) -> Forward:
        """The forward of this thread."""
        found: Forward | None = getattr(self._threads, "forward", None)
        if found is None:
            found = self._threads.forward = Forward()
        return found

    @outside_old_graphs
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's forward: raise where its call can't be merged."""
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
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if given.get("pixel_attention_mask") is not None:
            raise ValueError(
                "pixel_attention_mask: expected none, got one: tokens of images that are padded"
                " can't merge. Leave it out for images of one resolution that fill all patches"
            )
        self.now.unmasked = given.get(self.known.mask) is None

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the model's forward, or what it raised."""
        self.now.unmasked = False
        if not torch.compiler.is_compiling():
            self.running.discard(threading.get_ident())

    def computed(self, path: str, output: Tensor) -> None:
        """Note at how many places a convolution computes, and of the one that cuts patches how
        these lie: [B, C, h, w], of videos [B, C, t, h, w].
        """
        self.places[path] = math.prod(output.shape[2:])
        if path == self.patches:
            self.now.grid = math.prod(output.shape[2:-1]), output.shape[-1]

    @property
    def capturing(self) -> bool:
        """Whether what runs now is remembered after the forward."""
        return self.capture and not torch.compiler.is_compiling()

    def begin(self) -> Forward:
        """Begin a forward at its first block that merges: drop what an earlier one knew.

        Raises:
            ValueError: sizes are to count, or blocks to give all tokens, where they can't.
            RuntimeError: what cuts patches was replaced, so that their grid was missed.
        """
        for hook in self.inner:
            if hook.path == self.patches:
                hook.follow(late=True)
        now, reason = self.now, no_sizes(self.model)
        if reason and self.prop_attn:
            raise ValueError(reason)
        now.again = self.model.training and checkpoints_around(self.model)
        now.sized = self.prop_attn is not False and not reason
        if now.again and (self.dense or now.dense):
            raise ValueError(
                "expected no checkpointing around blocks (timm, transformers before 5.23) of a"
                " model whose features are read at every place, got it; switch it off, or call"
                " remove_mame"
            )
        now.sizes, now.plans, now.keys, now.whole = None, {}, {}, None
        if self.capturing:
            seen = [*now.earlier, *now.given]
            now.earlier, now.given = [one for one in seen if one() is not None], []
        return now

    def keep(self, number: int, plan: Plan | GroupPlan) -> None:
        """Note the plan of block `number` where it will be asked for."""
        now = self.now
        if self.restore or self.dense or now.dense or self.capturing:
            now.plans[number] = plan

    def restored(self, tokens: Tensor, before: int | None = None) -> Tensor:
        """Restore all tokens [B, L, C] of [B, L', C], by this thread's plans, last block first.

        Args:
            tokens: as the last block left them, or as they came to block number `before`.
        """
        plans = self.now.plans
        for number in sorted(plans, reverse=True):
            if before is None or number < before:
                tokens = plans[number].restore(tokens)
        return tokens

    def ended(self) -> None:
        """Drop plans that nobody will ask for."""
        if not self.capture:
            self.now.plans = {}

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a module whose output `handle.restore` may be asked for: remember it, so that one
        of an earlier forward is told apart; with `capture`.
        """
        if self.active and self.capturing and isinstance(output, Tensor):
            self.now.given.append(weakref.ref(output))

    def is_earlier(self, features: Tensor) -> bool:
        """Tell whether a forward before the latest gave these, as they are or as a view."""
        where = features.untyped_storage().data_ptr()
        earlier, latest = (
            any(
                (one := seen()) is not None and one.untyped_storage().data_ptr() == where
                for seen in some
            )
            for some in (self.now.earlier, self.now.given)
        )
        return earlier and not latest

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError while another thread is in a forward of the model."""
        if self.running - {threading.get_ident()}:
            raise RuntimeError(
                f"{what}: expected no other thread in a forward of {type(self.model).__name__}, got"
                " one, whose blocks would merge in two ways; wait for it"
            )


class FeatureMaps(Merging):
    """Replaces a method of the model that gives feature maps of several blocks: these give all
    tokens in it.
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
            self.shared.ended()


def no_sizes(model: Any) -> str:
    """Say why attention of `model` can't count sizes as it is set now; empty where it can."""
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind not in _ATTENTION:
        return (
            f"prop_attn: expected attention implementation 'eager' or 'sdpa', got {kind!r}; set one"
            " of these, or leave sizes out by prop_attn=False"
        )
    if model.training and checkpoints_around(model):
        return (
            "prop_attn: expected no checkpointing around blocks (timm, transformers before 5.23),"
            " which computes them again without the sizes of their tokens, got it; switch one of"
            " both off (prop_attn=False)"
        )
    return ""


def checkpoints_around(model: Any) -> bool:
    """Tell whether gradient checkpointing stands around whole blocks, not inside their calls."""
    return getattr(model, "grad_checkpointing", False) or any(  # timm; transformers < 5.23
        getattr(block, "gradient_checkpointing", False)
        and type(block).__call__ is not nn.Module.__call__
        for block in model.modules()
    )


def _convolutions(model: nn.Module, blocks: list[nn.Module]) -> tuple[list[str], str | None]:
    """Find the convolutions of `model` outside of its blocks, by path, and the one that cuts
    patches: the last one before the blocks, else the first.
    """
    inside = {part for block in blocks for part in block.modules()}
    paths: list[str] = []
    patches: str | None = None
    for path, module in model.named_modules():
        if module is blocks[0] and paths:
            patches = paths[-1]
        elif isinstance(module, CONVOLUTIONS) and module not in inside:
            paths.append(path)
    return paths, patches or next(iter(paths), None)
