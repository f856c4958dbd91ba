"""The command `mame-sd-eval`."""
