"""Why a test of diffusers fails with merging on, where that is understood."""

from __future__ import annotations

UNCORRECTED = (
    "The test compares with a model switched to diffusers' processor without fused attention. There"
    " merging went uncorrected when this was recorded."
)
SIZES = (
    "The test asks for one graph of all sizes (`dynamic=True`, an error at the next one). Merging"
    " makes one for each size."
)
REPLACED = (
    "An image prompt of scale 0 has to change nothing. `load_ip_adapter` makes processors of its"
    " own instead of the one-liner's (`apply_mame` stays)."
)
TAKEN_OFF = (
    "The test compares with the same model with other processors set. They take the one-liner off"
    " (`apply_mame` stays)."
)
RECORDED = "The test compares pixels with recorded ones, made without merging."
OTHER_DRAW = (
    "Two schedules whose timesteps differ by fractions have to give the same image within .001."
    " Another timestep takes another draw."
)
DRAWN = f"{OTHER_DRAW} The images are .024 apart, and .0018 with `redraw=False`."
NEAREST = (
    f"{OTHER_DRAW} Inputs that differ have other nearest destinations. The images are .0021 apart."
    " With `redraw=False` they stay above .001."
)
ONE_SEED = (
    "The samples of a batch have one seed here, so that they merge the same tokens at their first"
    " step. A sample alone has its own (`share_guidance_plan`). They are .0042 apart where .003 is"
    " allowed. The test passes with `share_guidance_plan=False`."
)
# (end of the test's name without its parameters, mode): the reason. It stands in
# docs/compatibility.md with the counts.
KNOWN: dict[tuple[str, str], str] = {
    **{
        (test, mode): UNCORRECTED
        for test in (
            "::test_pipeline_with_accelerator_device_map",
            "AnimateDiffPipelineFastTests::test_from_pipe_consistent_forward_pass",
        )
        for mode in ("on", "scaled")
    },
    **{
        (f"TestUNet2DConditionCustomDiffusion::test_custom_diffusion_{name}", mode): (
            "The test compares with custom diffusion's processors. Merging leaves their layers"
            " alone, as `report()` says."
        )
        for name in ("processors", "save_load")
        for mode in ("on", "scaled")
    },
    ("DiTPipelineFastTests::test_inference", "on"): RECORDED,
    **{
        (f"::test_{test}", "scaled"): RECORDED
        for test in (
            "stable_diffusion_lcm",
            "stable_diffusion_lcm_custom_timesteps",
            "stable_diffusion_inpaint_lcm",
            "stable_diffusion_inpaint_lcm_custom_timesteps",
            "stable_diffusion_xl_inpaint_euler_lcm",
            "stable_diffusion_xl_inpaint_euler_lcm_custom_timesteps",
            "controlnet_sdxl_lcm",
        )
    },
    ("TestStableDiffusionPipeline::test_stable_diffusion_ays", "scaled"): DRAWN,
    ("StableDiffusionXLPipelineFastTests::test_stable_diffusion_ays", "scaled"): NEAREST,
    (
        "StableDiffusion2PipelineFastTests::test_inference_batch_single_identical",
        "scaled",
    ): ONE_SEED,
    **{
        (f"::{test}", "processor"): TAKEN_OFF
        for test in (
            "test_custom_diffusion_processors",
            "test_custom_diffusion_save_load",
            "test_fused_qkv_projections",
            "test_pipeline_with_accelerator_device_map",
        )
    },
    **{
        (f"::{test}", "on"): SIZES
        for test in (
            "test_hotswapping_compiled_model_linear",
            "test_hotswapping_compiled_model_both_linear_and_other",
            "test_hotswapping_compile_on_different_shapes",
        )
    },
    ("TransformerCompile::test_compile_on_different_shapes", "on"): SIZES,
    ("TransformerCompile::test_compile_works_with_aot", "on"): (
        "The test exports Flux or Chroma before any forward. Their sizes stand in values that an"
        " export can't read. Merging refuses with that sentence."
    ),
    **{(f"::test_ip_adapter{kind}", "processor"): REPLACED for kind in ("", "_masks", "_faceid")},
    (
        "::test_encode_prompt_works_in_isolation",
        "pipeline",
    ): "The test reads the source of a pipeline of diffusers' own package, found by its name.",
}


# (start of the error, mode): the reason, whichever test it is.
REFUSED: dict[tuple[str, str], str] = {
    ("ValueError: Cannot call `set_default_attn_processor`", "processor"): (
        "The test calls `set_default_attn_processor`, which refuses every processor that is not"
        " diffusers' own. `set_attn_processor(AttnProcessor2_0())` takes the one-liner off."
    ),
}


def reason(test: str, mode: str, error: str) -> str:
    """The reason for a failing test; empty where there is none."""
    refused = (
        why for (start, where), why in REFUSED.items() if error.startswith(start) and where == mode
    )
    name = test.partition("[")[0]
    known = (why for (end, where), why in KNOWN.items() if name.endswith(end) and where == mode)
    return next(refused, next(known, ""))
