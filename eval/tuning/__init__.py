"""What ``mame-sd tune`` does: calibrate one's own model, check what was found on other prompts,
choose, write it down.
"""
