"""Methods that shorten a language model's KV cache, measured beside one another: `mame-sd-eval
cache`.
"""
