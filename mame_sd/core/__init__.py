"""Hold the mathematics: groups of keys, fitted values, attention over fewer keys, the paper's plan.

The modules use PyTorch alone, and no model library.
"""
