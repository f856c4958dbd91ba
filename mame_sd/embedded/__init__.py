"""Weights, glyphs and model card of the embedded model (data only)."""
