"""Every denoiser of diffusers at tiny size, its inputs, and what becomes of it (`python -m
tests.matrix --sweep`).
"""
