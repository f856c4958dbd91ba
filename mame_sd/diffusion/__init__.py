"""Connect merging to diffusers: hooks and a processor that merge in self-attention."""
