"""Wrap two of the engine's calls, so that layers merge during a run of the sampler.

`outer_sample` wraps a run, `apply_model` each call of the model. They put patches into that call's
options only. What a call needs to know is a `Call` in its `transformer_options`. Nothing is kept
between calls, so threads and several samplers may share one node. Because patches are added at the
call, those of other nodes come first in whatever order the nodes are wired, and `torch.compile`
outside of them traces no logging.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from mame_sd import MaMeConfig
from mame_sd.core.cells import DRAWS
from mame_sd.core.guidance import guidance_leaders, partition_index
from mame_sd.core.merge_keys import Choice, Grid, KeyMerging

from .attention import EngineCall
from .joint import JointPatch
from .layers import Key, Layers, Settings
from .mlps import RUNNING, restored, why_not
from .models import Place
from .run import KEY, OUTSIDE, TAKEN, UNCOMPILED, Run, log
from .unet import UNetPatch

RUN = "mame_sd_run"
UNGUIDED = 1  # in "cond_or_uncond", which names the chunks of a batch
COMPILED = "torch.compile"  # TorchCompileModel's wrapper, whose guards omit transformer_options


@dataclass
class Call:
    """What the patches need to know about one call of the model.

    Attributes:
        run: records what merged.
        draw: index of the random partition of the model's first layer, LongTensor [1]. Each layer
            counts on from it: neighbouring layers take different partitions, so that their errors
            don't add up.
        leader: for each sample the index of the sample whose tokens decide for it.
        replaced: UNet blocks whose self-attention another node replaces, by the engine's names.
        settings: settings of the layers.
        place: where a transformer's image is.
        text: number of tokens of its prompts.
        override: another node's attention.
        merge: merging of a UNet's layer, decided before its projections and run in its attention:
            returns the output of that call.
        unnamed: number of a transformer's layers so far that had no name.
        sizes: grids of a UNet's layers so far.
        merged: what merged in this call.
    """

    run: Run
    draw: Tensor
    leader: Tensor
    settings: Settings
    replaced: frozenset[tuple[Any, ...]] = frozenset()
    place: Place | None = None
    text: int = 0
    override: Callable[..., Tensor] | None = None
    merge: Callable[[EngineCall], Tensor] | None = None
    unnamed: int = 0
    sizes: dict[Key, tuple[int, int]] = field(default_factory=dict)
    merged: dict[str, None] = field(default_factory=dict)

    def note_merged(self, plan: Any, size: tuple[int, ...], what: str = "keys") -> None:
        """Record what merged in a layer."""
        kept, sides = f"{plan.tokens_in} -> {plan.tokens_kept}", " x ".join(map(str, size))
        self.merged[f"{kept} {what} at {sides}"] = None

    def merged_keys(
        self, config: MaMeConfig, size: tuple[int, ...], number: int, start: int, engine: EngineCall
    ) -> Tensor:
        """Compute the output of a layer with merged keys.

        Args:
            config: settings of the layer.
            size: grid of the image.
            number: index of the layer.
            start: first token of the image.
            engine: the engine's call.
        """
        assert config.keep is not None
        draw = (self.draw + number) % DRAWS if config.redraw else None
        leader = self.leader if config.share_guidance_plan else None
        options = KeyMerging(config.fit_queries, config.tile_size, config.seed)
        grid = Grid(start, size, config.keep)
        reason = engine.unlike(grid)
        if reason is not None:
            self.run.note_left(reason)
            return engine.run()
        output, groups = engine.merged(grid, options, Choice(draw, leader))
        self.note_merged(groups, size)
        return output

    def restored_mlp(self, key: Key, mlp: Callable[..., Any], x: Tensor) -> Any:
        """Return an MLP's output, restored if the settings say so.

        Args:
            key: the place of the MLP's block.
            mlp: the MLP's forward.
            x: the MLP's input [B, L, C].
        """
        config = self.settings.of_mlp(key)
        if config is None or config.mlp_share == 1:
            return mlp(x)
        size: tuple[int, ...] = self.sizes.get(key, ())
        start: int | None = 0 if size and x.shape[1] == math.prod(size) else None
        if self.place is not None:
            grid = self.place.grid
            size, start = grid[grid[0] == 1 :], self.place.start(x.shape[1])
        if reason := why_not(x, size, start, config):
            self.run.note_left(reason)
            return mlp(x)
        assert start is not None
        number = self.settings.layers.block_number(key)
        draw = (self.draw + number) % DRAWS if config.redraw else None
        leader = self.leader if config.share_guidance_plan else None
        output, chosen = restored(mlp, x, size, start, config, draw, leader)
        self.note_merged(chosen, size, "tokens of MLPs")
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
        """Return the call of another node's attention, or else of the engine's `function`."""
        function = function if self.override is None else partial(self.override, function)
        return EngineCall(function, q, k, v, args, kwargs)


class SamplerWrappers:
    """The wrappers of one applied node; they have no state.

    Args:
        patch: what merges in the model's attention.
        start: share of the sampling steps at which merging begins.
        end: share of the sampling steps at which merging ends.
    """

    def __init__(self, patch: UNetPatch | JointPatch, start: float, end: float) -> None:
        self.patch = patch
        self.start = start
        self.end = end
        self.always = start <= 0 and end >= 1

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap a run of the sampler. The guider's options are this run's own copy.

        Raises:
            ValueError: merging covers a part of the steps of a model that was compiled so that
                each step does what the first one did.
        """
        options = executor.class_obj.model_options.setdefault("transformer_options", {})
        if COMPILED in options.get("wrappers", {}).get("apply_model", {}):
            if not self.always:
                raise ValueError(
                    "start_percent, end_percent: expected 0 and 1 with TorchCompileModel, whose"
                    f" graph does at each step what it did at the first, got {self.start} and"
                    f" {self.end}; set those, or remove TorchCompileModel"
                )
            settings = self.patch.settings
            if settings.layers.mlps and min(one.mlp_share for one in settings.every) < 1:
                log.info(UNCOMPILED)
        options[RUN] = run = Run()
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
        """Wrap a call of the model on latents x [B, C, ..., H, W] at sigmas t [B].

        Args:
            executor: the engine's function.
            x: latents.
            t: sigmas.
            c_concat: as in the engine.
            c_crossattn: as in the engine.
            control: as in the engine.
            transformer_options: as in the engine.
            kwargs: as in the engine.
        """
        passed = transformer_options or {}
        options = dict(passed)
        run = passed.get(RUN) or Run()
        sampling = executor.class_obj.model_sampling
        if self._active(sampling, t):
            draw = partition_index(sampling.timestep(t).float())
            unguided = [kind == UNGUIDED for kind in passed.get("cond_or_uncond", ())]
            leader = guidance_leaders(x, unguided)
            override = passed.get("optimized_attention_override")
            options[KEY] = call = Call(run, draw, leader, self.patch.settings, override=override)
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
            running = RUNNING.set(call)
            try:
                output = executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
            finally:
                RUNNING.reset(running)
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
    """Make ours the last patch before the attention and the first one after it."""
    call.replaced = frozenset(options.get("patches_replace", {}).get("attn1", {}))
    patches = dict(options.get("patches", {}))
    patches["attn1_patch"] = [*patches.get("attn1_patch", []), patch.before]
    patches["attn1_output_patch"] = [patch.after, *patches.get("attn1_output_patch", [])]
    options["patches"] = patches


def _name_blocks(options: dict[str, Any], layers: Layers) -> None:
    """Let each block say which one it is, around what another node puts in its place.

    This is done only if layers have settings of their own: the engine checkpoints a block that is
    replaced, which breaks a compiled graph.
    """
    passed = options.get("patches_replace", {})
    others = passed.get("dit", {})
    blocks = {
        (f"{kind}_block", number): partial(
            _named_block, kind, number, others.get((f"{kind}_block", number))
        )
        for kind, number, *_ in layers.names
    }
    options["patches_replace"] = {**passed, "dit": {**others, **blocks}}


def _named_block(
    kind: str, number: int, replaced: Any, args: dict[str, Any], extra: dict[str, Any]
) -> Any:
    passed = args.get("transformer_options")
    if passed is not None:  # which older engines leave out
        named = {**passed, "block_type": kind, "block_index": number}
        args = {**args, "transformer_options": named}
    return extra["original_block"](args) if replaced is None else replaced(args, extra)
