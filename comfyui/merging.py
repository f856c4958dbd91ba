"""Merging during a run: two wrappers around the engine's calls, which put patches into that call's
options alone.

`outer_sample` wraps a run, `apply_model` each call of the model. What a call needs to know is a
`Call` in its `transformer_options`. Nothing is kept between calls, so threads and several samplers
may share one node. The patches go in at the call, so that other nodes' come first in whatever order
the nodes are wired. So `torch.compile` outside of them sees no logging.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from mame_sd import MaMeConfig
from mame_sd.core.keys import Grid, KeyMerging
from mame_sd.core.merge import DRAWS, draw_at, leaders

from .attention import EngineCall
from .handed import handing_on
from .joint import JointPatch
from .layers import Layers
from .models import Place
from .run import KEY, OUTSIDE, TAKEN, Run
from .unet import UNetPatch

RUN = "mame_sd_run"
UNGUIDED = 1  # in "cond_or_uncond", which names the chunks of a batch
COMPILED = (  # of TorchCompileModel's wrapper, whose guards leave out transformer_options
    "torch.compile"
)


@dataclass
class Call:
    """What the patches need to know of one call of the model.

    Attributes:
        run: notes what merged.
        draw: which of the drawn partitions the model's first layer takes, a LongTensor [1]. Each
            layer counts on from it: neighbours take different draws, so that their errors do not
            add up.
        leader: of each sample the one whose tokens decide what merges, see `mame_sd.core.merge`.
        replaced: UNet blocks whose self-attention another node replaces, as the engine names them.
        place: where a transformer's image is.
        text: tokens of its prompts.
        override: another node's attention.
        merge: of a UNet's layer, decided before its projections, on its way to its attention: gives
            the output of that call.
        counted: a transformer's layers that had no name so far.
        merged: what merged in this call.
    """

    run: Run
    draw: Tensor
    leader: Tensor
    replaced: frozenset[tuple[Any, ...]] = frozenset()
    place: Place | None = None
    text: int = 0
    override: Callable[..., Tensor] | None = None
    merge: Callable[[EngineCall], Tensor] | None = None
    counted: int = 0
    merged: dict[str, None] = field(default_factory=dict)

    def note_merged(self, plan: Any, size: tuple[int, ...], what: str = "keys") -> None:
        kept, sides = f"{plan.tokens_in} -> {plan.tokens_kept}", " x ".join(map(str, size))
        self.merged[f"{kept} {what} at {sides}"] = None

    def merged_keys(
        self, config: MaMeConfig, size: tuple[int, ...], number: int, start: int, engine: EngineCall
    ) -> Tensor:
        """The output of a layer of that number, whose image of that size begins at `start`."""
        assert config.keep is not None
        draw = (self.draw + number) % DRAWS if config.redraw else None
        leader = self.leader if config.share_guidance_plan else None
        how = KeyMerging(config.fit_queries, config.tile_size, config.seed)
        grid = Grid(start, size, config.keep)
        reason = engine.unlike(grid)
        if reason is not None:
            self.run.note_left(reason)
            return engine.run()
        output, groups = engine.merged(grid, how, draw, leader)
        self.note_merged(groups, size)
        return output

    def of_engine(
        self,
        function: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> EngineCall:
        """The call of another node's attention, or else of the engine's `function`."""
        function = function if self.override is None else partial(self.override, function)
        return EngineCall(function, q, k, v, args, kwargs)


class Merging:
    """The wrappers of one applied node; it never changes.

    Args:
        patch: what merges in the model's attention.
        start, end: share of the sampling steps between which tokens merge.
    """

    def __init__(self, patch: UNetPatch | JointPatch, start: float, end: float) -> None:
        self.patch = patch
        self.start = start
        self.end = end
        self.always = start <= 0 and end >= 1

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """A run of the sampler. The guider's options are this run's own copy.

        Raises:
            ValueError: a part of the steps, with a model compiled so that each step does what the
                first one did.
        """
        run = Run()
        options = executor.class_obj.model_options.setdefault("transformer_options", {})
        if not self.always and COMPILED in options.get("wrappers", {}).get("apply_model", {}):
            raise ValueError(
                "start_percent, end_percent: expected 0 and 1 beside TorchCompileModel, whose"
                f" graph does at each step what it did at the first, got {self.start} and"
                f" {self.end}; set those, or take TorchCompileModel out"
            )
        options[RUN] = run
        result = executor(*args, **kwargs)
        run.tell()
        return result

    def apply_model(
        self,
        executor: Any,
        x: Tensor,
        t: Tensor,
        c_concat: Any = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """A call of the model on latents x [B, C, ..., H, W] at sigmas t [B]."""
        given = transformer_options or {}
        options = dict(given)
        run = given.get(RUN) or Run()
        sampling = executor.class_obj.model_sampling
        if self._active(sampling, t):
            draw = draw_at(sampling.timestep(t).float())
            unguided = [kind == UNGUIDED for kind in given.get("cond_or_uncond", ())]
            leader = leaders(x, unguided)
            options[KEY] = call = Call(
                run, draw, leader, override=given.get("optimized_attention_override")
            )
            if call.override is not None:
                run.other_attention = True
            options["optimized_attention_override"] = self.patch.attend
            if isinstance(self.patch, UNetPatch):
                _patch_unet(options, call, self.patch)
            else:
                call.text = self.patch.transformer.text(c_crossattn, kwargs)
                call.place = self.patch.transformer.place(x.shape, kwargs, call.text)
                if self.patch.transformer.family.unnamed and self.patch.settings.by_layer:
                    _name_blocks(options, self.patch.settings.layers)
            with handing_on(options):
                output = executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
            if options["optimized_attention_override"] != self.patch.attend:
                run.note_left(TAKEN)
            run.note_merged(call.merged)
            return output
        run.note_left(OUTSIDE)
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

    def _active(self, sampling: Any, sigmas: Tensor) -> bool:
        if self.always:
            return True
        sigma = float(sigmas.max())
        return bool(
            sampling.percent_to_sigma(self.end) <= sigma <= sampling.percent_to_sigma(self.start)
        )


def _patch_unet(options: dict[str, Any], call: Call, patch: UNetPatch) -> None:
    """Ours is the last patch before the attention and the first one after it."""
    call.replaced = frozenset(options.get("patches_replace", {}).get("attn1", {}))
    patches = dict(options.get("patches", {}))
    patches["attn1_patch"] = [*patches.get("attn1_patch", []), patch.before]
    patches["attn1_output_patch"] = [patch.after, *patches.get("attn1_output_patch", [])]
    options["patches"] = patches


def _name_blocks(options: dict[str, Any], layers: Layers) -> None:
    """Each block says which one it is, around what another node puts in its place.

    Only where layers have settings of their own: the engine checkpoints a block that is replaced,
    which breaks a compiled graph.
    """
    given = options.get("patches_replace", {})
    others = given.get("dit", {})
    blocks = {
        (f"{kind}_block", number): partial(
            _named_block, kind, number, others.get((f"{kind}_block", number))
        )
        for kind, number, *_ in layers.names
    }
    options["patches_replace"] = {**given, "dit": {**others, **blocks}}


def _named_block(
    kind: str, number: int, replaced: Any, args: dict[str, Any], extra: dict[str, Any]
) -> Any:
    given = args.get("transformer_options")
    if given is not None:  # which older engines leave out
        named = {**given, "block_type": kind, "block_index": number}
        args = {**args, "transformer_options": named}
    return extra["original_block"](args) if replaced is None else replaced(args, extra)
