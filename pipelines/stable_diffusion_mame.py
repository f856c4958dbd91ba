"""StableDiffusionMaMePipeline: StableDiffusionPipeline with token merging as one of its settings.

    pipe = StableDiffusionMaMePipeline.from_pretrained(model, tau=0.8)
    image = pipe("a red key").images[0]
    plain = pipe("a red key", tau=None).images[0]        # off for this call
    print(pipe.mame.report())                            # of the latest call that merged

Merging belongs to the pipeline, not to its UNet: it is on only during the pipeline's calls. A UNet
that is shared through `from_pipe` gives bit-equal images in the other pipeline, which neither reads
nor changes this one's settings. Merging that `apply_mame` put on the UNet is suspended during a
merged call and resumes after it.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, get_type_hints

from diffusers import StableDiffusionPipeline

from mame_sd.config import NAMES, MaMeConfig, check_names, checked
from mame_sd.diffusion.apply_denoiser import build_handle, hooks_on
from mame_sd.diffusion.handle import MaMeHandle, Placed
from mame_sd.diffusion.hook_registry import put_hook, remove_hook
from mame_sd.diffusion.saved_setting import DEFAULT, ENTRY, resolve_setting
from mame_sd.diffusion.threads import CHANGES, begin, check_idle, end

SAVED = {"tau": DEFAULT, "keep": None, "mame_config": None}  # with their defaults
FIELDS = tuple(name for name in NAMES if name not in SAVED)
_UNSET: Any = "unset"


class StableDiffusionMaMePipeline(StableDiffusionPipeline):
    """Text-to-image with Stable Diffusion 1.x and 2.x, with merging in its large self-attentions.

    Args:
        tau: Similarity above which a token may merge. Lower values merge more: faster, and farther
            from the unmerged image. None is off (if `keep` is None too); "default" is the measured
            default.
        keep: Share of tokens to keep, instead of a fixed `tau`.
        mame_config: Further fields of MaMeConfig, as a dict, a MaMeConfig or a file of settings.
            Its `tau` and `keep` are used if the arguments leave them out.

    All three are saved in model_index.json, which names StableDiffusionPipeline as the class. So
    diffusers' own classes load a saved folder too, as a plain pipeline that doesn't merge. Load it
    with this class to merge as saved. `from_pretrained(folder, tau=0.9)` overrides what was saved,
    and `from_pretrained(folder, tau=None, keep=0.5)` changes from one to the other.
    `from_pretrained`, `from_single_file` and `from_pipe` also take each field of MaMeConfig by its
    name (`min_tokens=256`), which overrides `mame_config`. The other arguments are those of
    StableDiffusionPipeline.

    Raises:
        ValueError: If a setting is unknown or out of range, or if both tau and keep are given.
    """

    def __init__(
        self,
        *components: Any,
        tau: float | str | None = DEFAULT,
        keep: float | None = None,
        mame_config: Any = None,
        **others: Any,
    ) -> None:
        fields = _taken(others)
        super().__init__(*components, **others)
        self._mame: MaMeHandle | None = None
        self._calls = 0  # that merge now, each in a thread of its own
        self._foreign: list[Placed] = []  # hooks of other handles, during calls that merge
        self.set_mame(tau=tau, keep=keep, mame_config={**_dict_of(mame_config), **fields})

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> StableDiffusionMaMePipeline:
        """Load a pipeline as StableDiffusionPipeline does, with any field of MaMeConfig.

        Raises ValueError for an invalid value before a model is loaded.
        """
        _check(kwargs)
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def from_single_file(cls, *args: Any, **kwargs: Any) -> StableDiffusionMaMePipeline:
        """Load a pipeline as StableDiffusionPipeline does, with any field of MaMeConfig.

        Raises ValueError for an invalid value before a model is loaded.
        """
        _check(kwargs)
        return super().from_single_file(*args, **kwargs)

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a config, with saved merging settings under the names that `__init__` takes."""
        loaded = super().load_config(*args, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.update(config.pop(ENTRY, {}))
        return loaded

    def to_json_string(self) -> str:
        """Return the text of model_index.json.

        It is that of a StableDiffusionPipeline, with merging in an entry of its own.
        """
        config = json.loads(super().to_json_string())
        for name in SAVED:
            del config[name]
        config["_class_name"] = StableDiffusionPipeline.__name__
        config[ENTRY] = {name: self.config[name] for name in SAVED}  # the order of layers counts
        return json.dumps(config, indent=2) + "\n"

    @property
    def tau(self) -> float | str | None:
        """Return the threshold that this pipeline merges with, or "default".

        It is None if `keep` is set or merging is off.
        """
        return self.config.tau

    @property
    def keep(self) -> float | None:
        """Return the share of tokens that stay; None if `tau` is set or merging is off."""
        return self.config.keep

    @property
    def mame(self) -> MaMeHandle | None:
        """Return the handle with counters of the latest call that merged; None before one."""
        return self._mame

    @property
    def mame_config(self) -> MaMeConfig | None:
        """Return all settings that the next call merges with; None if merging is off."""
        return resolve_setting(self.config.tau, self.config.keep, self.config.mame_config)

    def set_mame(self, tau: Any = _UNSET, keep: Any = _UNSET, mame_config: Any = _UNSET) -> None:
        """Change settings for all further calls and for saving.

        Args:
            tau: Replaces `keep`, as in the constructor.
            keep: Replaces `tau`, as in the constructor.
            mame_config: Further fields, as in the constructor.

        Raises:
            ValueError: If a setting is unknown or out of range. Nothing has changed then.
        """
        fields = _dict_of(self.config.get("mame_config") if mame_config is _UNSET else mame_config)
        number = {n: fields.pop(n) for n in ("tau", "keep") if fields.get(n) is not None}
        if number and tau in (_UNSET, DEFAULT) and keep in (_UNSET, None):
            tau, keep = number.get("tau"), number.get("keep")
        tau, keep = self._choice(tau, keep)
        resolve_setting(tau, keep, fields)
        if fields.get("layers") is not None:
            fields["layers"] = dict(fields["layers"])  # of LayerRules, which JSON has not
        self.register_to_config(tau=tau, keep=keep, mame_config=fields or None)

    def __call__(self, *args: Any, tau: Any = _UNSET, keep: Any = _UNSET, **kwargs: Any) -> Any:
        """Generate images; arguments and result are those of StableDiffusionPipeline's call.

        Args:
            args: StableDiffusionPipeline's.
            tau: Threshold for this call only, also if it raises; None is off, "default" the
                measured default.
            keep: Share of tokens to keep for this call only.
            kwargs: StableDiffusionPipeline's, and any other field of MaMeConfig for this call only.

        Raises:
            ValueError: If a setting is out of range, or if both tau and keep are given.
        """
        fields = {**_dict_of(self.config.mame_config), **_taken(kwargs)}
        config = resolve_setting(*self._choice(tau, keep), fields)
        if config is None:
            return super().__call__(*args, **kwargs)
        with self._merging(config):
            return super().__call__(*args, **kwargs)

    def _choice(self, tau: Any, keep: Any) -> tuple[Any, Any]:
        """Return (tau, keep), where given values replace those of the pipeline."""
        if tau is _UNSET and keep is _UNSET:
            return self.config.get("tau", DEFAULT), self.config.get("keep")
        tau, keep = (None if value is _UNSET else value for value in (tau, keep))
        return (None if tau == DEFAULT and keep is not None else tau), keep

    @contextmanager
    def _merging(self, config: MaMeConfig) -> Iterator[None]:
        """Merge with `config` in this thread within the `with` block.

        The hooks stay on the UNet afterwards, inactive, so that a compiled UNet isn't compiled
        again for every call. They never replace another handle's.
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
                    self._end()

    def _begin(self, config: MaMeConfig) -> None:
        """Put the hooks on the UNet for calls that merge."""
        if self._mame is None or self._mame.root is not self.unet:
            self._mame = build_handle(self.unet, config, active=False)
        handle = self._mame
        self._foreign = [] if handle.installed else hooks_on(self.unet)
        try:
            handle.install()
            handle.set(config)
        except BaseException:
            self._end()
            raise
        handle.reset()

    def _end(self) -> None:
        """Put the hooks of other handles back, which the calls that merge have replaced.

        Raises:
            RuntimeError: afterwards, if another thread makes an image, which then has two settings.
        """
        if not self._foreign:
            return
        for module, hook in hooks_on(self.unet):
            remove_hook(module, hook.name)
        for module, hook in self._foreign:
            put_hook(module, hook)
        self._foreign = []
        check_idle(self.unet, "the end of the call")


def _dict_of(mame_config: Any) -> dict[str, Any]:
    """Return the fields of a `mame_config`, given as a dict, a MaMeConfig or a file."""
    if isinstance(mame_config, (str, PathLike)):
        mame_config = MaMeConfig.from_file(mame_config)
    if isinstance(mame_config, MaMeConfig):
        mame_config = mame_config.to_dict(given_only=True)
    return dict(mame_config or {})


def _taken(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of MaMeConfig from `arguments` and return them."""
    return {name: arguments.pop(name) for name in FIELDS if name in arguments}


def _check(arguments: dict[str, Any]) -> None:
    """Raise ValueError for invalid settings among a loader's arguments.

    They are invalid whatever is saved with the model.
    """
    fields = _dict_of(arguments.get("mame_config"))
    check_names(fields)
    settings = {**fields, **arguments}
    for name in NAMES:
        if (name, settings.get(name)) != ("tau", DEFAULT):
            checked(name, settings.get(name))


def _signature(base: Callable[..., Any], **added: Any) -> inspect.Signature:
    """Return the signature of a method of StableDiffusionPipeline with our keywords added.

    diffusers' loaders, help() and other tools look arguments up in it.
    """
    parameters = list(inspect.signature(base).parameters.values())
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=object)
        for name, value in added.items()
    ]
    return inspect.Signature([*(p for p in parameters if p not in rest), *ours, *rest])


# Of the components, which diffusers looks at.
StableDiffusionMaMePipeline.__init__.__annotations__ = get_type_hints(
    StableDiffusionPipeline.__init__
)
StableDiffusionMaMePipeline.__init__.__signature__ = _signature(  # type: ignore[attr-defined]
    StableDiffusionPipeline.__init__, **SAVED, **dict.fromkeys(FIELDS)
)
StableDiffusionMaMePipeline.__call__.__signature__ = _signature(  # type: ignore[attr-defined]
    StableDiffusionPipeline.__call__, tau=_UNSET, keep=_UNSET
)
