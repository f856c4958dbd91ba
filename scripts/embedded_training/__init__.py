"""The parts of ``train_embedded.py``: the training loop, the autoencoder, the text side, the
diffusion stages, the export.
"""
