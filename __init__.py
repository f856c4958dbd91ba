"""For `git clone` into ComfyUI's custom_nodes, which imports the clone under its path: the node of
`comfyui/`.
"""

import sys

if (
    __name__.isidentifier()
):  # pytest, which takes the checkout for a package that may be called as a real one is
    sys.modules.pop(__name__, None)
else:
    from .comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
