"""Kinds of models: where the image's tokens are in their attention calls, and what goes with
them.
"""
