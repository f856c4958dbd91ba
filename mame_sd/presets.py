"""What settings are where they are not given: the tables that measurement chose, and the
paper's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# What measurement chose (PRESETS["default"]) and the paper with our settled points
# (PRESETS["plain"]). A new default is one edit here. A given tau or keep takes the place of either.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "keep": 0.25,
        "merge": "kv",
        "partition": "random-grid",
        "redraw": True,
        "pairs": True,
        "tiles": 16,
        "weights": "best",
        "correct": True,
        "detail": True,
    },
    "plain": {"tau": 0.8, "merge": "qkv", "partition": "alternating", "tiles": 0},
}
# Cells of the grid when keep is given, from small to large. With about as many destinations as it
# allows, (nearly) every source merges. Merged keys then stand for equally many tokens.
CELLS = ((1, 2), (1, 3), (2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4))
COMMON: dict[str, Any] = {
    "stride": (2, 2),
    "seed": 0,
    "redraw": False,
    "pairs": False,
    "min_tokens": 1024,
    "metric": "cosine",
    "feature": "x",
    "weights": "average",
    "correct": False,
    "refine": True,
    "variant": "settled",
    "eps": 1e-6,
    "detail": False,
}


def resolve(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of MaMeConfig, concrete: what was given over what the preset says."""
    preset = dict(
        PRESETS["plain" if given.get("variant") == "paper" else given.get("preset", "default")]
    )
    if "tau" in given or "keep" in given:
        preset.pop("tau", None)
        preset.pop("keep", None)
    unset = dict.fromkeys(("tau", "keep", "size", "mlp", "references", "layers", "made_for"))
    values = {**unset, "preset": "default", **COMMON, **preset, **given}
    if values["weights"] == "pick" and "merge" not in given:
        values["merge"] = "kv"
    if "correct" not in given and values["merge"] == "kv" and values["weights"] != "best":
        values["correct"] = False  # other weights would need all keys and values for it
    if "detail" not in given and values["weights"] == "average":
        values["detail"] = False  # restored by weights of their own
    if values["keep"] is not None and "stride" not in given:
        values["stride"] = _cell(values["keep"], values["tiles"])
    return values


def _cell(keep: float, tile_side: int) -> tuple[int, int]:
    """The cell with the most destinations that is within the share `keep`, cells cut by a tile's
    border counted whole.
    """

    def share(cell: tuple[int, int]) -> float:
        return math.prod(
            math.ceil(tile_side / side) / tile_side if tile_side else 1 / side for side in cell
        )

    return max((cell for cell in CELLS if share(cell) <= keep + 1e-9), key=share, default=CELLS[-1])
