"""Every denoiser of diffusers at tiny size, its inputs, and what merges and is restored in it."""
