"""Evaluation of merged models: metrics, benchmark suites, tuning and a report.

In a checkout ``python -m eval``, installed ``mame-sd-eval`` or ``python -m mame_sd.eval``. Its
modules are those of ``mame_sd.eval``, under that name alone.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PROGRAM = "mame-sd-eval"


class OneName:
    """An import finder that refuses ``eval.x``, of which a checkout would otherwise load a second
    copy.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith("eval.") and name != "eval.__main__":
            raise ImportError(
                f"expected the name mame_sd.{name}, got {name}; import mame_sd.{name}", name=name
            )
        return None


if __name__ == "eval":  # in a checkout, by `import eval` or `python -m eval`
    sys.meta_path.insert(0, OneName)
    sys.modules["eval"] = importlib.import_module("mame_sd.eval")
