"""StableDiffusionMaMePipeline: everything StableDiffusionPipeline has, with token merging as one of
its settings.

    pipe = StableDiffusionMaMePipeline.from_pretrained(model, tau=0.8)
    image = pipe("a red key").images[0]
    plain = pipe("a red key", tau=None).images[0]        # off for this call
    print(pipe.mame.report())                            # of the latest call that merged

Merging belongs to the pipeline, not to its UNet: it is on during the pipeline's calls only. A UNet
that is shared through `from_pipe` gives bit-equal images in the other pipeline, which neither sees
nor changes this one's settings. What was put on the UNet by `apply_mame` steps back during a merged
call and is in force again after it.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields as fields_of
from functools import partial
from os import PathLike
from typing import Any

from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from diffusers.schedulers import KarrasDiffusionSchedulers
from transformers import (
    CLIPImageProcessor,
    CLIPTextModel,
    CLIPTokenizer,
    CLIPVisionModelWithProjection,
)

from mame_sd.config import NAMES, MaMeConfig
from mame_sd.diffusion.apply_denoiser import build_handle, has_hooks, hooks_restored
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.diffusion.saved_setting import DEFAULT, ENTRY, resolve_setting
from mame_sd.diffusion.threads import CHANGES, begin, end
from mame_sd.layer_rules import LayerRules

SAVED = ("tau", "keep", "mame_config")
PLACES = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
_UNSET: Any = "unset"


class StableDiffusionMaMePipeline(StableDiffusionPipeline):
    """Text-to-image with Stable Diffusion 1.x and 2.x, and MaMe + MaRe in its large
    self-attentions.

    Args:
        tau: similarity above which a token may merge. Lower merges more: faster, further from the
            unmerged image. None is off (if `keep` is None too); "default" is what measurement
            chose.
        keep: share of tokens to keep instead of a fixed `tau`.
        mame_config: any further fields of MaMeConfig, as a dict, a MaMeConfig or a file of
            settings. `tau` and `keep` of it count where the arguments leave them out.

    All three are saved in model_index.json, which names StableDiffusionPipeline as the class. So
    diffusers' own classes load a saved folder too, as a plain pipeline that does not merge. Load it
    by this class, or by `mame-sd generate --model`. `from_pretrained(folder, tau=0.9)` overrides
    what was saved, and `from_pretrained(folder, tau=None, keep=0.5)` changes from one to the other.
    `from_pretrained`, `from_single_file` and `from_pipe` also take each field of MaMeConfig by its
    name (`min_tokens=256`), over those of `mame_config`. The other arguments are those of
    StableDiffusionPipeline.

    Raises:
        ValueError: a setting is unknown or out of its range, or both tau and keep are given.
    """

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: CLIPTextModel,
        tokenizer: CLIPTokenizer,
        unet: UNet2DConditionModel,
        scheduler: KarrasDiffusionSchedulers,
        safety_checker: StableDiffusionSafetyChecker,
        feature_extractor: CLIPImageProcessor,
        image_encoder: CLIPVisionModelWithProjection = None,
        requires_safety_checker: bool = True,
        tau: float | str | None = DEFAULT,
        keep: float | None = None,
        mame_config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            unet=unet,
            scheduler=scheduler,
            safety_checker=safety_checker,
            feature_extractor=feature_extractor,
            image_encoder=image_encoder,
            requires_safety_checker=requires_safety_checker,
        )
        self._mame: MaMeHandle | None = None
        self._calls = 0  # that merge now, each in a thread of its own
        self._foreign = ExitStack()  # puts back the hooks of others
        self.set_mame(tau=tau, keep=keep, mame_config=mame_config)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> StableDiffusionMaMePipeline:
        """As StableDiffusionPipeline's, with any field of MaMeConfig.

        Raises ValueError for one out of its range.
        """
        places = {name: kwargs[name] for name in PLACES if name in kwargs}
        saved = partial(cls.load_config, *args, **places)
        return super().from_pretrained(*args, **_with_config(kwargs, saved))

    @classmethod
    def from_single_file(cls, *args: Any, **kwargs: Any) -> StableDiffusionMaMePipeline:
        """As StableDiffusionPipeline's, with any field of MaMeConfig.

        Raises ValueError for one out of its range.
        """
        return super().from_single_file(*args, **_with_config(kwargs, dict))

    @classmethod
    def from_pipe(cls, pipeline: Any, **kwargs: Any) -> StableDiffusionMaMePipeline:
        """As StableDiffusionPipeline's, with any field of MaMeConfig.

        Raises ValueError for one out of its range.
        """
        return super().from_pipe(pipeline, **_with_config(kwargs, lambda: pipeline.config))

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As StableDiffusionPipeline's, with the saved merging under the names that `__init__`
        takes.
        """
        loaded = super().load_config(*args, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.update(config.pop(ENTRY, {}))
        return loaded

    def to_json_string(self) -> str:
        """The text of model_index.json: that of a StableDiffusionPipeline, with merging in an entry
        of its own.
        """
        config = json.loads(super().to_json_string())
        config[ENTRY] = {name: config.pop(name) for name in SAVED}
        config["_class_name"] = StableDiffusionPipeline.__name__
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    @property
    def tau(self) -> float | str | None:
        """The threshold this pipeline merges with; None with `keep` or when off, "default" for the
        measured default.
        """
        return self.config.tau

    @property
    def keep(self) -> float | None:
        """The share of tokens this pipeline keeps; None with `tau` or when off."""
        return self.config.keep

    @property
    def mame(self) -> MaMeHandle | None:
        """Counters (`report`) and plans of the latest call that merged; None before one."""
        return self._mame

    @property
    def mame_config(self) -> MaMeConfig | None:
        """All settings that the next call merges with; None when merging is off."""
        return resolve_setting(self.config.tau, self.config.keep, self.config.mame_config)

    def set_mame(self, tau: Any = _UNSET, keep: Any = _UNSET, mame_config: Any = _UNSET) -> None:
        """Changes settings for all further calls and for saving.

        Giving one of `tau` and `keep` replaces the other.

        Raises:
            ValueError: a setting is unknown or out of its range; nothing has changed then.
        """
        if mame_config is not _UNSET:
            mame_config = _over(mame_config, {})
        fields = dict(
            (self.config.get("mame_config") if mame_config is _UNSET else mame_config) or {}
        )
        threshold = {
            name: fields.pop(name) for name in ("tau", "keep") if fields.get(name) is not None
        }
        if tau in (_UNSET, DEFAULT) and keep in (_UNSET, None) and threshold:
            tau, keep = threshold.get("tau"), threshold.get("keep")
        tau, keep = self._choice(tau, keep)
        resolve_setting(tau, keep, fields)
        if (
            fields.get("layers") is not None
        ):  # later rules go before earlier ones, and the file is sorted
            fields["layers"] = [
                list(rule) for rule in LayerRules(fields["layers"]).to_dict().items()
            ]
        self.register_to_config(tau=tau, keep=keep, mame_config=fields or None)

    def __call__(self, *args: Any, tau: Any = _UNSET, keep: Any = _UNSET, **kwargs: Any) -> Any:
        """Generates images; takes and returns what StableDiffusionPipeline's call does.

        Args:
            tau: threshold for this call alone, also when it raises; None is off, "default" the
                measured default.
            keep: share of tokens to keep for this call alone.
            kwargs: StableDiffusionPipeline's, and any other field of MaMeConfig for this call
                alone.

        Raises:
            ValueError: a setting is out of its range, or both tau and keep are given.
        """
        fields = _over(self.config.mame_config, _taken(kwargs))
        config = resolve_setting(*self._choice(tau, keep), fields)
        if config is None:
            return super().__call__(*args, **kwargs)
        with self._merging(config):
            return super().__call__(*args, **kwargs)

    def _choice(self, tau: Any, keep: Any) -> tuple[Any, Any]:
        """(tau, keep), where what is given replaces what the pipeline has."""
        if tau is _UNSET and keep is _UNSET:
            return self.config.get("tau", DEFAULT), self.config.get("keep")
        tau, keep = (None if value is _UNSET else value for value in (tau, keep))
        return (None if tau == DEFAULT and keep is not None else tau), keep

    @contextmanager
    def _merging(self, config: MaMeConfig) -> Iterator[None]:
        """Merges with `config` in this thread while entered; the UNet behaves as before after that.

        The hooks stay on the UNet, inactive, so that a compiled UNet need not compile again for
        every call. They never replace another handle's.
        """
        unet, image = self.unet, threading.Lock()
        with CHANGES:
            if self._calls == 0:
                self._begin(config)
            self._calls += 1
            begin(unet, "image", image)
        try:
            with self._mame.using(config):  # type: ignore[union-attr]
                yield
        finally:
            end(unet, "image")
            with CHANGES:
                self._calls -= 1
                if self._calls == 0:
                    self._foreign.close()

    def _begin(self, config: MaMeConfig) -> None:
        """Put the hooks on, for calls that merge."""
        if self._mame is None or self._mame.root is not self.unet:
            self._mame = build_handle(self.unet, config, active=False)
        handle = self._mame
        with ExitStack() as foreign:
            if not handle.installed:
                if has_hooks(self.unet):
                    foreign.enter_context(hooks_restored(self.unet))
                handle.install()
            handle.set(config)
            handle.reset()
            self._foreign = foreign.pop_all()


def _over(mame_config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `mame_config`, given as a dict, a MaMeConfig or a file, with `fields` over
    them.
    """
    if isinstance(mame_config, (str, PathLike)):
        mame_config = MaMeConfig.from_file(mame_config)
    if isinstance(mame_config, MaMeConfig):
        mame_config = mame_config.to_dict(given_only=True)
    return {**(mame_config or {}), **fields}


def _with_config(arguments: dict[str, Any], saved: Callable[[], Any]) -> dict[str, Any]:
    """`arguments` with the fields of MaMeConfig among them in `mame_config`.

    They go over the `mame_config` that is given, or else over that of the configuration `saved()`.
    """
    if fields := _taken(arguments):
        under = arguments if "mame_config" in arguments else saved()
        arguments["mame_config"] = _over(under.get("mame_config"), fields)
    return arguments


def _taken(arguments: dict[str, Any]) -> dict[str, Any]:
    """The fields of MaMeConfig among `arguments`, taken out of them; what __init__ takes stays."""
    if "mame_config" in arguments:
        arguments["mame_config"] = _over(arguments["mame_config"], {}) or None
    names = [name for name in NAMES if name not in ("tau", "keep")]
    taken = {name: arguments.pop(name) for name in names if name in arguments}
    # A bad value is refused before a model is loaded.
    of = {field.name: field.metadata.get("method") for field in fields_of(MaMeConfig)}
    number = {n: arguments[n] for n in ("tau", "keep") if isinstance(arguments.get(n), int | float)}
    saved_tau = not number and any(of.get(name) == "tokens" for name in taken)
    MaMeConfig.from_dict({**taken, **number, **({"tau": 0.0} if saved_tau else {})})
    return taken


def _signature() -> inspect.Signature:
    """StableDiffusionPipeline's call with `tau` and `keep`, for help() and for callers that look
    arguments up.
    """
    base = inspect.signature(StableDiffusionPipeline.__call__)
    ours = inspect.signature(StableDiffusionMaMePipeline.__call__).parameters
    own = [ours["tau"], ours["keep"]]
    named = [p for p in base.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [p for p in base.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    return base.replace(parameters=[*named, *own, *rest])


StableDiffusionMaMePipeline.__call__.__signature__ = _signature()  # type: ignore[attr-defined]
