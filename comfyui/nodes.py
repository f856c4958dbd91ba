"""The node: takes a model and gives one that merges tokens in its large self-attention layers."""

from __future__ import annotations

from typing import Any, ClassVar

from mame_sd import MaMeConfig

from .merging import KEY, Merging
from .models import Transformer, layout_of

KEYS_AND_VALUES, QUERIES_TOO = "keys and values", "queries too"
SHARE = {"min": 0.0, "max": 1.0, "step": 0.01, "round": 0.001}


class MaMeModelPatch:
    """Node: merges tokens in the self-attention of a UNet or of the image in a transformer."""

    RETURN_TYPES: ClassVar = ("MODEL",)
    OUTPUT_TOOLTIPS: ClassVar = ("The model, merging. The one that came in is left as it is.",)
    FUNCTION: ClassVar = "patch"
    CATEGORY: ClassVar = "model/patch"
    DESCRIPTION: ClassVar = (
        "Faster sampling without training: similar tokens merge in large self-attention layers. "
        "The log says what merged, or why nothing did."
    )
    SEARCH_ALIASES: ClassVar = ["token merging", "ToMe", "MaRe", "speed"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        default = MaMeConfig()
        number = {"step": 0.01, "round": 0.001}
        return {
            "required": {
                "model": (
                    "MODEL",
                    {
                        "tooltip": (
                            "UNets (SD 1.x, SD 2.x, SDXL) and the transformers named in the README."
                        )
                    },
                ),
                "mode": (
                    ["keep", "tau"],
                    {
                        "tooltip": (
                            "keep: a fixed share of tokens remains. tau: tokens more similar than a"
                            " threshold merge."
                        )
                    },
                ),
                "keep": (
                    "FLOAT",
                    {"default": default.keep, "min": 0.01, "max": 1.0, **number}
                    | {
                        "tooltip": (
                            "Used by mode keep: share of tokens that remain. Lower is faster and"
                            " changes more."
                        )
                    },
                ),
                "tau": (
                    "FLOAT",
                    {"default": 0.8, "min": -1.0, "max": 1.0, **number}
                    | {
                        "tooltip": (
                            "Used by mode tau: similarity above which tokens merge. 1 merges"
                            " nothing."
                        )
                    },
                ),
                "merge": (
                    [KEYS_AND_VALUES, QUERIES_TOO],
                    {
                        "tooltip": (
                            f"{KEYS_AND_VALUES} changes the image less; {QUERIES_TOO} is faster,"
                            " UNets only."
                        )
                    },
                ),
                "min_tokens": (
                    "INT",
                    {"default": default.min_tokens, "min": 1, "max": 1 << 20}
                    | {"tooltip": "Layers with fewer tokens are left alone."},
                ),
                "start_percent": (
                    "FLOAT",
                    {
                        "default": 0.0,
                        **SHARE,
                        "tooltip": "Share of sampling at which merging begins.",
                    },
                ),
                "end_percent": (
                    "FLOAT",
                    {
                        "default": 1.0,
                        **SHARE,
                        "tooltip": "Share of sampling at which merging ends.",
                    },
                ),
            },
            "optional": {  # workflows from before it was there load too
                "correct": (
                    "BOOLEAN",
                    {"default": default.correct}
                    | {
                        "tooltip": (
                            "Changes the image less: attention gets back what merged"
                            f" {KEYS_AND_VALUES} lose."
                        )
                    },
                ),
            },
        }

    def patch(
        self,
        model: Any,
        mode: str,
        keep: float,
        tau: float,
        merge: str,
        min_tokens: int,
        start_percent: float = 0.0,
        end_percent: float = 1.0,
        correct: bool = True,
    ) -> tuple[Any]:
        """A clone of `model` that merges; one that merged already takes these settings instead.

        Raises:
            ValueError: a value out of its range, or a model that can't merge so.
        """
        kind = "qkv" if merge == QUERIES_TOO else "kv"
        amount = {mode: keep if mode == "keep" else tau}
        config = MaMeConfig.from_dict(
            {**amount, "merge": kind, "min_tokens": min_tokens, "correct": correct}
        )
        if not 0 <= start_percent <= end_percent <= 1:
            raise ValueError(
                "start_percent, end_percent: expected shares with 0 <= start_percent <="
                f" end_percent <= 1, got {start_percent} and {end_percent}"
            )
        layout = layout_of(model.get_model_object("diffusion_model"))
        if isinstance(layout, Transformer) and kind == "qkv":
            raise ValueError(
                f"merge: expected {KEYS_AND_VALUES!r} for {layout.family.name}, got {merge!r}; "
                "its queries carry positions that do not merge"
            )
        merging = Merging(config, layout, start_percent, end_percent)
        clone = model.clone()
        for kind_of_call, wrapper in (
            ("outer_sample", merging.outer_sample),
            ("apply_model", merging.apply_model),
        ):
            clone.remove_wrappers_with_key(kind_of_call, KEY)
            clone.add_wrapper_with_key(kind_of_call, KEY, wrapper)
        return (clone,)


NODE_CLASS_MAPPINGS = {"MaMeModelPatch": MaMeModelPatch}
NODE_DISPLAY_NAME_MAPPINGS = {"MaMeModelPatch": "MaMe token merging"}
