"""Stable Diffusion with token merging, in the form of diffusers' community pipelines.

    pip install mame-sd

    pipe = DiffusionPipeline.from_pretrained(
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        custom_pipeline="examples/mame_stable_diffusion",  # this folder
        trust_remote_code=True,
        keep=0.5,
    )
    image = pipe("a photo of an astronaut riding a horse").images[0]
    print(pipe.mame.report())

diffusers takes the one pipeline that this file names. Other models need no class of their own:
`mame_sd.apply_mame(pipe)`.
"""

from mame_sd.pipelines import StableDiffusionMaMePipeline

__all__ = ["StableDiffusionMaMePipeline"]
