"""diffusers pipelines with merging built in."""

from .stable_diffusion_mame import StableDiffusionMaMePipeline

__all__ = ["StableDiffusionMaMePipeline"]
