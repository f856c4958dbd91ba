"""Test which components of a pipeline merge, for all pipelines of the installed diffusers."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Pipe
from typing import Any

import diffusers
import pytest
from diffusers import ModularPipeline, UNet2DConditionModel
from diffusers.modular_pipelines import Flux2AutoBlocks, MiniMaxH3Blocks
from torch import nn

from mame_sd import apply_mame
from mame_sd.diffusion.calibration import Measurement, measure
from mame_sd.diffusion.denoisers import DENOISERS, OTHER_NAMES, denoiser_of, denoisers_of
from tests.builders.tiny import tiny_unet
from tests.matrix.models.sweep import classes

# Components that look like denoisers: a ControlNet has a call of its own, Versatile Diffusion's
# `text_unet` lends its blocks to `image_unet`, UnCLIP's super resolution has no attention, an RVQ
# decoder makes sound.
LEFT_OUT = ("controlnet", "text_unet", "super_res_first", "super_res_last", "rvq_depth_decoder")
HOME = Path(diffusers.__file__).parent


def components() -> dict[str, set[str]]:
    """Return the names of all components that are denoisers, each with the files that name it."""
    kinds = classes()
    found: dict[str, set[str]] = {}
    assert {"FluxTransformer2DModel", "StableCascadeUNet", "UNet2DConditionModel"} <= kinds
    for room in ("pipelines", "modular_pipelines"):
        for file in (HOME / room).rglob("*.py"):
            text = file.read_text()
            pairs = re.findall(r"^        (\w+): ([^\n=]+?)(?: = .*)?,?$", text, re.M)
            pairs += re.findall(r'ComponentSpec\(\s*"(\w+)",\s*(\w+)', text)
            named = {name for name, kind in pairs if kinds & set(re.findall(r"\w+", kind))}
            named.update(re.findall(r'transformer_name="(\w+)"', text))
            for name in named - {"else", "type_hint"}:
                found.setdefault(name, set()).add(file.stem)
    return found


def test_every_component_that_denoises_is_in_a_list() -> None:
    found = components()
    known = {*DENOISERS, *OTHER_NAMES, *LEFT_OUT}
    assert {name: files for name, files in found.items() if name not in known} == {}
    assert known - found.keys() == set(), "a name that no pipeline has any more"


def test_every_denoiser_of_a_pipeline_merges() -> None:
    """Both denoisers of MiniMax H3 and Stable Cascade merge; a prior over embeddings does not."""
    unet = tiny_unet()
    prior = type("PriorTransformer", (nn.Module,), {})()
    for names in (("transformer", "transformer_ref"), ("decoder", "prior_prior")):
        assert tuple(denoisers_of(Pipe(**dict.fromkeys(names, unet)))) == names
    for name in ("unet", "decoder"):
        assert denoiser_of(Pipe(**{name: unet, "prior_prior": prior})) is unet
    assert denoiser_of(Pipe(transformer=unet, transformer_2=None)) is unet  # taken as it is
    with pytest.raises(ValueError, match=r"^Prior does not merge: its tokens are no image's"):
        apply_mame(Pipe(prior=prior))


@pytest.mark.parametrize("blocks", [Flux2AutoBlocks, MiniMaxH3Blocks])
def test_a_modular_pipeline_is_asked_to_load_first(blocks: Any) -> None:
    pipe = ModularPipeline(blocks())
    with pytest.raises(TypeError, match=r"its transformer, but \w+ has none yet: call load_comp"):
        apply_mame(pipe)


@pytest.mark.parametrize(("target", "message"), [(3, "got int"), (Pipe(unet=None), "give it one")])
def test_what_has_no_denoiser_is_refused(target: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        apply_mame(target)


def test_a_pipeline_of_two_denoisers_is_named_and_not_calibrated() -> None:
    pipe = Pipe(transformer=tiny_unet(), transformer_2=tiny_unet())
    handle = apply_mame(pipe, keep=0.5, min_tokens=16)
    assert handle.described == "UNet2DConditionModel with 14 self-attentions"
    with pytest.raises(ValueError, match="got one with transformer and transformer_2; give"):
        measure(handle, list, Measurement())


@pytest.mark.parametrize("names", [("unet",), ("transformer", "transformer_2")])
def test_settings_in_the_pipelines_folder_are_taken_and_read_anew(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    tiny_unet().save_pretrained(tmp_path / "unet")
    load = partial(UNet2DConditionModel.from_pretrained, tmp_path / "unet")
    pipe = Pipe(**{name: load() for name in names})
    for keep in (0.5, 0.125):
        (tmp_path / "mame.json").write_text(json.dumps({"keep": keep}))
        assert apply_mame(pipe).config.keep == keep
