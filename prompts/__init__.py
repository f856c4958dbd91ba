"""Prompt files that come with mame-sd (data only; the loader is `mame_sd.prompt_files`)."""
