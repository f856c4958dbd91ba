"""For `git clone` into ComfyUI's custom_nodes, which imports the clone as a package: the node of `comfyui/`."""

if __package__:  # test runners import this file too, without a package where the folder's name is no identifier
    from .comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
