"""Make `import mame_sd` work in ComfyUI: the copy next to this folder, or an installed one.

The copy is loaded by its path: with the repository on `sys.path`, its other folders (`eval`,
`tests`, ...) could be imported by every node. Its core needs PyTorch only.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

MISSING = (
    "MaMe token merging: expected the folder mame_sd next to {}, or the package mame-sd installed,"
    " and found neither; git clone the whole repository into custom_nodes, or pip install --no-deps"
    " the package"
)


def load(folder: Path) -> None:
    """Import `mame_sd`, from `folder` if it contains the package.

    Raises:
        ImportError: it is neither there nor installed.
    """
    init = folder / "mame_sd" / "__init__.py"
    if "mame_sd" not in sys.modules and init.is_file():
        spec = importlib.util.spec_from_file_location(
            "mame_sd", init, submodule_search_locations=[str(init.parent)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["mame_sd"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif importlib.util.find_spec("mame_sd") is None:
        raise ImportError(MISSING.format(folder))


load(Path(__file__).resolve().parents[1])
