"""The embedded models, a folder each (weights, glyphs, model card), and the module that knows
them.
"""
