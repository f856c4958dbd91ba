"""Metrics as pure functions on images or features, one per file."""
