"""Merging in engines that run diffusion models with their own code."""
