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
# NAME: paths below tests/pipelines of diffusers, a file without its ".py".
PIPELINES = """
SD 3: stable_diffusion_3/test_pipeline_stable_diffusion_3
SDXL img2img: stable_diffusion_xl/test_stable_diffusion_xl_img2img
Flux: flux/test_pipeline_flux
SD: stable_diffusion/test_stable_diffusion
SD img2img, inpaint:
    stable_diffusion/test_stable_diffusion_img2img
    stable_diffusion/test_stable_diffusion_inpaint
SD 2: stable_diffusion_2/test_stable_diffusion stable_diffusion_2/test_stable_diffusion_inpaint
SDXL, inpaint:
    stable_diffusion_xl/test_stable_diffusion_xl
    stable_diffusion_xl/test_stable_diffusion_xl_inpaint
SD 3 img2img, inpaint:
    stable_diffusion_3/test_pipeline_stable_diffusion_3_img2img
    stable_diffusion_3/test_pipeline_stable_diffusion_3_inpaint
Flux img2img, Kontext: flux/test_pipeline_flux_img2img flux/test_pipeline_flux_kontext
ControlNet: controlnet/test_controlnet controlnet/test_controlnet_sdxl
T2I-Adapter: stable_diffusion_adapter
PAG: pag/test_pag_sd pag/test_pag_sdxl pag/test_pag_sd3 pag/test_pag_pixart_sigma
PixArt: pixart_alpha pixart_sigma
DiT: dit
HunyuanDiT: hunyuandit
AnimateDiff: animatediff/test_animatediff
Chroma: chroma/test_pipeline_chroma
AuraFlow: aura_flow
Qwen-Image: qwenimage/test_qwenimage
Wan: wan/test_wan
LTX: ltx/test_ltx
CogVideoX: cogvideo/test_cogvideox
Flux 2: flux2
Z-Image: z_image
Krea 2: krea2
HunyuanVideo 1.5: hunyuan_video1_5
LTX-2: ltx2/test_ltx2 ltx2/test_ltx2_image2video ltx2/test_ltx2_in_context
Wan 2.2: wan/test_wan_22 wan/test_wan_22_image_to_video
Qwen-Image edits: qwenimage/test_qwenimage_edit qwenimage/test_qwenimage_edit_plus
HunyuanVideo: hunyuan_video
HunyuanImage: hunyuan_image_21
Lumina 2: lumina2
HiDream: hidream_image
Kandinsky 5: kandinsky5
CogView 4: cogview4
GLM-Image: glm_image
Mochi: mochi
SkyReels V2: skyreels_v2/test_skyreels_v2
OmniGen: omnigen
Bria: bria bria_fibo
Ovis-Image: ovis_image
PRX: prx
"""
# NAME: models below tests/models/transformers.
MODELS = """
transformers: sd3 flux chroma hunyuan_dit lumina aura_flow qwenimage wan ltx cogvideox
Flux 2, Z-Image, Krea 2, HunyuanVideo 1.5, LTX-2: flux2 z_image krea2 hunyuan_1_5 ltx2
Flux's kin: bria bria_fibo ovis_image longcat_image
image and text in one sequence: ideogram4 lumina2 omnigen ernie_image minimax_h3 cosmos3
images in joint attention: hidream cogview3plus cogview4 glm_image prx nucleusmoe_image joyimage
    joyimage_edit_plus
videos in joint attention: hunyuan_video hunyuan_video_framepack mochi motif_video easyanimate
    consisid
videos with cross-attention: wan_vace wan_animate skyreels_v2 chronoedit cosmos anyflow allegro
    helios latte
"""
LORAS = ("sd", "sdxl", "sd3", "flux", "auraflow", "cogvideox", "ltx_video", "qwenimage", "wan")


def table(text: str) -> dict[str, list[str]]:
    """NAME: WORDS by line; an indented line goes on with those of the line before it."""
    lines = text.strip().replace("\n    ", " ").splitlines()
    return {name: words.split() for name, _, words in (line.rpartition(":") for line in lines)}


def pipeline_path(path: str) -> str:
    file = path.rpartition("/")[2].startswith("test_")
    return f"tests/pipelines/{path}{'.py' if file else ''}"


def model_path(name: str) -> str:
    return f"tests/models/transformers/test_models_{name}.py"


SUITES: dict[str, list[str]] = {
    **{name: [*map(pipeline_path, paths)] for name, paths in table(PIPELINES).items()},
    "hooks": ["tests/hooks"],
    "models: UNets": [
        "tests/models/unets/test_models_unet_2d_condition.py",
        "tests/models/unets/test_models_unet_motion.py",
    ],
    "models: PixArt, DiT": [
        *map(model_path, ("pixart_transformer2d", "dit_transformer2d")),
    ],
    "models: attention processors": ["tests/models/test_attention_processor.py"],
    **{
        f"models: {kind}": [model_path(f"transformer_{name}") for name in names]
        for kind, names in table(MODELS).items()
    },
    "LoRA": [f"tests/lora/test_lora_layers_{name}.py" for name in LORAS],
}
COMPILED = ("models: UNets", "models: transformers")  # compile tests, with each backend
BACKENDS = ("eager", "aot_eager")
ONE_LINER = ("SD", "SD img2img, inpaint", "SDXL, inpaint", "ControlNet", "PixArt", "models: UNets")
PIPELINE = ("SD",)


def runs(mode: str) -> list[str]:
    """The suites that run in `mode`."""
    return list({"processor": ONE_LINER, "pipeline": PIPELINE}.get(mode, SUITES))
