"""ComfyUI custom node: MaMe on a loaded model.

Clone the whole repository, or link or copy this folder (see README.md).
"""

from . import library  # noqa: F401  (makes `import mame_sd` work; before the nodes, which need it)
from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
