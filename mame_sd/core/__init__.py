"""The mathematics: groups of keys, fitted values, attention over fewer keys, and the paper's plan.

PyTorch alone, no model library.
"""
