"""The command `mame-sd`."""
