"""Fewer visual tokens for a language model: merging in the vision tower of LLaVA and LLaVA-NeXT."""
