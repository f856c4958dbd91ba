"""Define the node, which returns a model that merges in its large self-attention layers."""

from __future__ import annotations

from typing import Any, ClassVar

from mame_sd import MaMeConfig

from .joint import JointPatch
from .layers import Settings, place_of, settings_in
from .mlps import restoring_forward
from .models import layout_of
from .run import KEY
from .unet import UNetPatch
from .wrappers import SamplerWrappers

DEFAULT = "default"
UNREAD = "references", "size"  # settings that only apply_mame follows


def _input(kind: Any, tooltip: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    return kind, {**options, "tooltip": tooltip}


def _share(default: float | None, tooltip: str, least: float = 0.0) -> tuple[Any, dict[str, Any]]:
    return _input("FLOAT", tooltip, default=default, min=least, max=1.0, step=0.01, round=0.001)


class MaMeModelPatch:
    """Node that merges keys, or tokens, in the self-attention over an image."""

    RETURN_TYPES: ClassVar = ("MODEL",)
    OUTPUT_TOOLTIPS: ClassVar = ("The model, merging. The one that came in is left as it is.",)
    FUNCTION: ClassVar = "patch"
    CATEGORY: ClassVar = "model/patch"
    DESCRIPTION: ClassVar = (
        "Faster sampling without training: similar keys merge in large self-attention layers, and "
        "large MLPs are computed on a few tokens. "
        "The log says what merged, or why nothing did."
    )
    SEARCH_ALIASES: ClassVar = ["token merging", "ToMe", "MaRe", "speed"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the node's inputs."""
        return {
            "required": {
                "model": _input(
                    "MODEL",
                    "UNets (SD 1.x, SD 2.x, SDXL) and the transformers named in the README.",
                ),
                "mode": _input(
                    [DEFAULT, "keep", "tau"],
                    f"{DEFAULT}: what apply_mame does by default; keep, mlp_keep and tau are not"
                    " read. keep: a fixed share of the keys remains. tau: whole tokens more similar"
                    " than a threshold merge (the paper's method, UNets only).",
                ),
                "keep": _share(
                    MaMeConfig().keep,
                    "Used by mode keep: share of keys that remain. Lower is faster and changes"
                    " more.",
                    least=0.01,
                ),
                "tau": _share(
                    0.8,
                    "Used by mode tau: similarity above which tokens merge. 1 merges nothing.",
                    least=-1.0,
                ),
                "min_tokens": _input(
                    "INT",
                    "Layers with fewer tokens don't merge. 0: depends on the device.",
                    default=0,
                    min=0,
                    max=1 << 20,
                ),
                "start_percent": _share(0.0, "Share of sampling at which merging begins."),
                "end_percent": _share(1.0, "Share of sampling at which merging ends."),
            },
            "optional": {
                "settings": _input(
                    "STRING",
                    "A file of settings by layer, as mame-sd calibrate writes: a path in ComfyUI's"
                    " input folder, or an absolute one. It replaces mode, keep, mlp_keep,"
                    " tau and min_tokens. Empty: those are used.",
                    default="",
                ),
                "mlp_keep": _share(
                    1.0,
                    "Used by mode keep: share of the image's tokens on which MLPs are computed; a"
                    " fit restores the others. 1 computes all. Lower is faster and changes more."
                    " The README names the models.",
                    least=0.01,
                ),
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, settings: str = "") -> bool | str:
        """Return what the editor shows for a file that can't be read."""
        try:
            return not settings or bool(settings_in(settings))
        except ValueError as error:
            return str(error)

    @classmethod
    def IS_CHANGED(cls, settings: str = "", **_: Any) -> float:
        """Return another number after the file was written again."""
        return place_of(settings).stat().st_mtime if settings else 0.0

    def patch(
        self,
        model: Any,
        mode: str,
        keep: float,
        tau: float,
        min_tokens: int,
        start_percent: float = 0.0,
        end_percent: float = 1.0,
        settings: str = "",
        mlp_keep: float = 1.0,
    ) -> tuple[Any]:
        """Return a clone of `model` that merges; a model that merges already gets new settings.

        Args:
            model: the engine's model.
            mode: "default", "keep" or "tau".
            keep: share of keys that remains, with mode "keep".
            tau: similarity above which tokens merge, with mode "tau".
            min_tokens: layers with fewer tokens don't merge; 0 for the device's default.
            start_percent: share of sampling at which merging begins.
            end_percent: share of sampling at which merging ends.
            settings: file of settings by layer, or "".
            mlp_keep: share of the tokens on which MLPs are computed, with mode "keep".

        Raises:
            ValueError: a value is out of range, a file has no settings or those of another
                model, or the model can't merge in this way.
        """
        if not 0 <= start_percent <= end_percent <= 1:
            raise ValueError(
                "start_percent, end_percent: expected shares with 0 <= start_percent <="
                f" end_percent <= 1, got {start_percent} and {end_percent}"
            )
        transformer, layers = layout_of(model.get_model_object("diffusion_model"))
        if settings:
            config = settings_in(settings)
        else:
            modes = {DEFAULT: {}, "keep": {"keep": keep, "mlp_keep": mlp_keep}, "tau": {"tau": tau}}
            config = MaMeConfig.from_dict({**modes[mode], "min_tokens": min_tokens or None})
        model_name = "this UNet" if transformer is None else transformer.family.name
        of_layers = Settings(config, layers, model_name)
        for name in UNREAD:
            if any(name in one.given for one in of_layers.every):
                raise ValueError(
                    f"settings: {name}: expected none of {', '.join(UNREAD)} in ComfyUI, which the"
                    " node does not read; remove it from the file"
                )
        _check_restoring(of_layers, model_name)
        whole = any(one.method == "tokens" for one in of_layers.every)
        if whole and transformer is not None:
            raise ValueError(
                f"tau: expected mode keep for {model_name}, in which only keys merge in ComfyUI,"
                " got tau; set mode keep or default"
            )
        patch: Any = UNetPatch(of_layers)
        if transformer is not None:
            patch = JointPatch(of_layers, transformer)
        wrappers, clone = SamplerWrappers(patch, start_percent, end_percent), model.clone()
        for kind_of_call, wrapper in (
            ("outer_sample", wrappers.outer_sample),
            ("apply_model", wrappers.apply_model),
        ):
            clone.remove_wrappers_with_key(kind_of_call, KEY)
            clone.add_wrapper_with_key(kind_of_call, KEY, wrapper)
        if any(one.mlp_share < 1 for one in of_layers.every):
            for key, (path, _) in layers.mlps.items():
                place = f"diffusion_model.{path}.forward"
                forward = restoring_forward(key, model.get_model_object(place))
                clone.add_object_patch(place, forward)
        return (clone,)


def _check_restoring(settings: Settings, model_name: str) -> None:
    """Raise ValueError if settings ask for MLPs or blocks that are not restored here."""
    if any(one.block_share < 1 for one in settings.every):
        raise ValueError(
            "settings: block_keep: expected 1, since ComfyUI's blocks can't be restored; calibrate"
            " with --block-keep 1, or remove it from the file"
        )
    if not settings.layers.mlps and any((one.mlp_keep or 1) < 1 for one in settings.every):
        raise ValueError(
            f"mlp_keep: expected 1 for {model_name}, whose MLPs the node does not restore; set 1"
        )


NODE_CLASS_MAPPINGS = {"MaMeModelPatch": MaMeModelPatch}
NODE_DISPLAY_NAME_MAPPINGS = {"MaMeModelPatch": "MaMe token merging"}
