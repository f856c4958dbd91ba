"""What settings are where they are not given: the tables that measurement chose, and the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# What measurement chose (PRESETS["default"]) and the paper with our settled points (PRESETS["plain"]). A new
# default is one edit here. Keys: what was given, of tau and keep; "neither" holds what is then used.
_CHOSEN: dict[str, Any] = {
    "merge": "kv",
    "partition": "random-grid",
    "redraw": True,
    "tiles": 16,
    "weights": "best",
    "correct": True,
}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {"neither": {"keep": 0.25}, "keep": _CHOSEN, "tau": _CHOSEN},
    "plain": {
        "neither": {"tau": 0.8},
        "keep": {"merge": "qkv", "partition": "alternating", "tiles": 0},
        "tau": {"merge": "qkv", "partition": "alternating", "tiles": 0},
    },
}
# Cells of the grid when keep is given, from small to large: with about as many destinations as it allows, (nearly) every
# source merges, and merged keys stand for equally many tokens.
CELLS = ((1, 2), (1, 3), (2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4))
COMMON: dict[str, Any] = {
    "stride": (2, 2),
    "seed": 0,
    "redraw": False,
    "min_tokens": 1024,
    "metric": "cosine",
    "feature": "x",
    "weights": "average",
    "correct": False,
    "refine": True,
    "variant": "settled",
    "eps": 1e-6,
    "kernel": None,
}
PAPER_TAU = 0.8  # what variant="paper" takes when neither tau nor keep is given: it knows no keep


def resolve(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of MaMeConfig, concrete: what was given over what the preset says."""
    preset = PRESETS[given.get("preset", "default")]
    chosen = dict(given)
    if "tau" not in chosen and "keep" not in chosen:
        chosen.update({"tau": PAPER_TAU} if given.get("variant") == "paper" else preset["neither"])
    table = preset["keep" if "keep" in chosen else "tau"]
    unset = dict.fromkeys(("tau", "keep", "size", "mlp", "cross"))
    values = {**unset, "preset": "default", **COMMON, **table, **chosen}
    if values["weights"] == "pick" and "merge" not in chosen:
        values["merge"] = "kv"
    if "correct" not in chosen and (values["merge"], values["weights"]) != ("kv", "best"):
        values["correct"] = False  # other weights would need all keys and values for it
    if "keep" in chosen and "stride" not in chosen:
        values["stride"] = _cell(chosen["keep"], values["tiles"])
    return values


def _cell(keep: float, tile_side: int) -> tuple[int, int]:
    """The cell with the most destinations that is within the share `keep`, cells cut by a tile's border counted whole."""

    def share(cell: tuple[int, int]) -> float:
        return math.prod(math.ceil(tile_side / side) / tile_side if tile_side else 1 / side for side in cell)

    return max((cell for cell in CELLS if share(cell) <= keep + 1e-9), key=share, default=CELLS[-1])
