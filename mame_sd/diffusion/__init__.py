"""The way into diffusers: hooks and a processor that merge around self-attention."""
