"""Describe kinds of models: where the image's tokens are in their attention calls."""
