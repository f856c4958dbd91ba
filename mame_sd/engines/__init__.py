"""Merging in engines that serve diffusion models with code of their own."""
