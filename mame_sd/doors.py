"""Folders saved by StableDiffusionMaMePipeline, loaded by diffusers' own classes: merging where mame_sd is imported, plain elsewhere.

    import mame_sd
    from diffusers import AutoPipelineForText2Image

    pipe = AutoPipelineForText2Image.from_pretrained(folder)    # a StableDiffusionMaMePipeline

model_index.json names StableDiffusionPipeline, so that diffusers alone can load the folder, and holds the merging in an
entry that diffusers passes over. All of its classes load by `DiffusionPipeline.from_pretrained`: once diffusers is
imported, that looks for the entry first.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

ENTRY = "_mame"  # of model_index.json; a name with a leading underscore is private to whoever wrote it
PLACES = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
_PIPELINES = "diffusers.pipelines.pipeline_utils"
_GENERAL = ("DiffusionPipeline", "StableDiffusionPipeline")


def open_doors() -> None:
    """Lets diffusers' classes load saved merging, now or as soon as diffusers' pipelines are imported."""
    if _PIPELINES in sys.modules:
        _open(sys.modules[_PIPELINES])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Opens the doors at the end of diffusers' import of its pipelines, and imports nothing by itself."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _PIPELINES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Opener(spec.loader)
        return spec


class _Opener(Loader):
    """The loader of diffusers' pipelines, and the doors after it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        _open(module)


def _open(pipelines: Any) -> None:
    base = pipelines.DiffusionPipeline
    own = base.from_pretrained.__func__

    @functools.wraps(own)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        general = cls.__module__.startswith("diffusers.") and cls.__name__ in _GENERAL
        if general and "custom_pipeline" not in kwargs and _merges(cls, pretrained_model_name_or_path, kwargs):
            cls = import_module("mame_sd.pipelines").StableDiffusionMaMePipeline
            return cls.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return own(cls, pretrained_model_name_or_path, **kwargs)

    base.from_pretrained = classmethod(from_pretrained)


def _merges(cls: Any, source: Any, kwargs: dict[str, Any]) -> bool:
    """Whether merging was saved with the pipeline at `source`."""
    try:
        return ENTRY in cls.load_config(source, **{name: kwargs[name] for name in PLACES if name in kwargs})
    except (OSError, ValueError):  # not there: diffusers says so
        return False
