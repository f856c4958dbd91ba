"""Measure methods that shorten a language model's KV cache: `mame-sd-eval cache`."""
