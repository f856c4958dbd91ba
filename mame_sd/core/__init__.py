"""The mathematics: partition, similarity, weights, plans that merge and restore.

PyTorch alone, no model library.
"""
