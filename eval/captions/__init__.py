"""Measure captions of pictures with fewer visual tokens: `mame-sd-eval caption`."""
