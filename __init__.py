"""ComfyUI imports this file when the repository is cloned into its folder custom_nodes.

It passes on the node of `comfyui/`. Nothing else imports it.
"""

import sys

# pytest takes the checkout for a package, under a name that a real package might have.
if __name__.isidentifier():
    sys.modules.pop(__name__, None)
else:
    from .comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
