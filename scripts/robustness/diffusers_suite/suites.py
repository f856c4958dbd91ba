"""Which of diffusers' tests run, and in which modes."""

from __future__ import annotations

# What is counted is what passes in the mode's ground: a test that fails there says nothing about
# merging.
GROUND = {
    "off": "without",
    "on": "without",
    "processor": "without",
    "pipeline": "without",
    "scaled": "scaled-without",
}
MODES = {
    "without": "diffusers alone",
    "off": "`apply_mame` on every model, `active = False`",
    "on": "`apply_mame(keep=0.5, min_tokens=1)` on every model",
    "processor": "`MaMeAttnProcessor`, the same settings",
    "pipeline": "StableDiffusionMaMePipeline instead of StableDiffusionPipeline, the same settings",
    "scaled-without": "diffusers alone, weights of queries and keys times 4",
    "scaled": "merging, weights of queries and keys times 4",
}
PIPELINES = {
    "SD 3": ("stable_diffusion_3/test_pipeline_stable_diffusion_3.py",),
    "SDXL img2img": ("stable_diffusion_xl/test_stable_diffusion_xl_img2img.py",),
    "Flux": ("flux/test_pipeline_flux.py",),
    "SD": ("stable_diffusion/test_stable_diffusion.py",),
    "SD img2img, inpaint": (
        "stable_diffusion/test_stable_diffusion_img2img.py",
        "stable_diffusion/test_stable_diffusion_inpaint.py",
    ),
    "SD 2": (
        "stable_diffusion_2/test_stable_diffusion.py",
        "stable_diffusion_2/test_stable_diffusion_inpaint.py",
    ),
    "SDXL, inpaint": (
        "stable_diffusion_xl/test_stable_diffusion_xl.py",
        "stable_diffusion_xl/test_stable_diffusion_xl_inpaint.py",
    ),
    "SD 3 img2img, inpaint": (
        "stable_diffusion_3/test_pipeline_stable_diffusion_3_img2img.py",
        "stable_diffusion_3/test_pipeline_stable_diffusion_3_inpaint.py",
    ),
    "Flux img2img, Kontext": (
        "flux/test_pipeline_flux_img2img.py",
        "flux/test_pipeline_flux_kontext.py",
    ),
    "ControlNet": ("controlnet/test_controlnet.py", "controlnet/test_controlnet_sdxl.py"),
    "T2I-Adapter": ("stable_diffusion_adapter",),
    "PAG": (
        "pag/test_pag_sd.py",
        "pag/test_pag_sdxl.py",
        "pag/test_pag_sd3.py",
        "pag/test_pag_pixart_sigma.py",
    ),
    "PixArt": ("pixart_alpha", "pixart_sigma"),
    "DiT": ("dit",),
    "HunyuanDiT": ("hunyuandit",),
    "AnimateDiff": ("animatediff/test_animatediff.py",),
    "Chroma": ("chroma/test_pipeline_chroma.py",),
    "AuraFlow": ("aura_flow",),
    "Qwen-Image": ("qwenimage/test_qwenimage.py",),
    "Wan": ("wan/test_wan.py",),
    "LTX": ("ltx/test_ltx.py",),
    "CogVideoX": ("cogvideo/test_cogvideox.py",),
    "Flux 2": ("flux2",),
    "Z-Image": ("z_image",),
    "Krea 2": ("krea2",),
    "HunyuanVideo 1.5": ("hunyuan_video1_5",),
    "LTX-2": (
        "ltx2/test_ltx2.py",
        "ltx2/test_ltx2_image2video.py",
        "ltx2/test_ltx2_in_context.py",
    ),
    "Wan 2.2": ("wan/test_wan_22.py", "wan/test_wan_22_image_to_video.py"),
    "Qwen-Image edits": (
        "qwenimage/test_qwenimage_edit.py",
        "qwenimage/test_qwenimage_edit_plus.py",
    ),
    "HunyuanVideo": ("hunyuan_video",),
    "HunyuanImage": ("hunyuan_image_21",),
    "Lumina 2": ("lumina2",),
    "HiDream": ("hidream_image",),
    "Kandinsky 5": ("kandinsky5",),
    "CogView 4": ("cogview4",),
    "GLM-Image": ("glm_image",),
    "Mochi": ("mochi",),
    "SkyReels V2": ("skyreels_v2/test_skyreels_v2.py",),
    "OmniGen": ("omnigen",),
    "Bria": ("bria", "bria_fibo"),
    "Ovis-Image": ("ovis_image",),
    "PRX": ("prx",),
}
TRANSFORMERS = [
    "sd3",
    "flux",
    "chroma",
    "dit",
    "hunyuan_dit",
    "lumina",
    "aura_flow",
    "qwenimage",
    "wan",
    "ltx",
    "cogvideox",
]
TODAY = ["flux2", "z_image", "krea2", "hunyuan_1_5", "ltx2"]
NEWER = {
    "Flux's kin": ["bria", "bria_fibo", "ovis_image", "longcat_image"],
    "image and text in one sequence": [
        "ideogram4",
        "lumina2",
        "omnigen",
        "ernie_image",
        "minimax_h3",
        "cosmos3",
    ],
    "images in joint attention": [
        "hidream",
        "cogview3plus",
        "cogview4",
        "glm_image",
        "prx",
        "nucleusmoe_image",
        "joyimage",
        "joyimage_edit_plus",
    ],
    "videos in joint attention": [
        "hunyuan_video",
        "hunyuan_video_framepack",
        "mochi",
        "motif_video",
        "easyanimate",
        "consisid",
    ],
    "videos with cross-attention": [
        "wan_vace",
        "wan_animate",
        "skyreels_v2",
        "chronoedit",
        "cosmos",
        "anyflow",
        "allegro",
        "helios",
        "latte",
    ],
}
MODELS = {
    "models: UNets": ("unets/test_models_unet_2d_condition.py", "unets/test_models_unet_motion.py"),
    "models: PixArt, DiT": (
        "transformers/test_models_pixart_transformer2d.py",
        "transformers/test_models_dit_transformer2d.py",
    ),
    "models: attention processors": ("test_attention_processor.py",),
    "models: transformers": tuple(
        f"transformers/test_models_transformer_{name}.py" for name in TRANSFORMERS if name != "dit"
    ),
    "models: Flux 2, Z-Image, Krea 2, HunyuanVideo 1.5, LTX-2": tuple(
        f"transformers/test_models_transformer_{name}.py" for name in TODAY
    ),
    **{
        f"models: {kind}": tuple(
            f"transformers/test_models_transformer_{name}.py" for name in names
        )
        for kind, names in NEWER.items()
    },
}
LORAS = ["sd", "sdxl", "sd3", "flux", "auraflow", "cogvideox", "ltx_video", "qwenimage", "wan"]
SUITES: dict[str, tuple[str, ...]] = {
    **{
        name: tuple(f"tests/pipelines/{path}" for path in paths)
        for name, paths in PIPELINES.items()
    },
    "hooks": ("tests/hooks",),
    **{name: tuple(f"tests/models/{path}" for path in paths) for name, paths in MODELS.items()},
    "LoRA": tuple(f"tests/lora/test_lora_layers_{name}.py" for name in LORAS),
}
COMPILED = ("models: UNets", "models: transformers")  # compile tests, with each backend
BACKENDS = ("eager", "aot_eager")
ONE_LINER = ("SD", "SD img2img, inpaint", "SDXL, inpaint", "ControlNet", "PixArt", "models: UNets")
PIPELINE = ("SD",)


def runs(mode: str) -> list[str]:
    """The suites that run in `mode`."""
    return list({"processor": ONE_LINER, "pipeline": PIPELINE}.get(mode, SUITES))
