"""Captions of pictures with fewer visual tokens, beside rivals: `mame-sd-eval caption`."""
