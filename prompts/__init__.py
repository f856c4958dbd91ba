"""Prompt files that come with mame-sd (data only; the loader is `mame_sd.runs.prompt_files`)."""
