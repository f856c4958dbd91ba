"""What ``mame-sd tune`` does: a ladder of settings from mild to strong, measured on one's own model, and one chosen."""
