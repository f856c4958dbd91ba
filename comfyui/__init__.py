"""ComfyUI custom node: puts MaMe on a loaded model. Copy or link this folder into ComfyUI/custom_nodes (see README.md)."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
