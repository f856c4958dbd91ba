"""A custom node of the server that the tests start: teaches the engine a tiny SD 1.5, and writes
`tiny.safetensors` of it.

The engine recognises checkpoints by the shapes of known models, so a tiny one has to be added to
its list.
"""

import functools

import comfy.sd1_clip
import comfy.supported_models
import comfy.taesd.taesd
import comfy.utils
import folder_paths
import torch
from comfy import model_base, supported_models_base

UNET = {
    "context_dim": 64,
    "model_channels": 32,
    "use_linear_in_transformer": False,
    "adm_in_channels": None,
    "use_temporal_attention": False,
}
WHOLE = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "use_spatial_transformer": True,
    "context_dim": 64,
    "num_heads": 8,
    "legacy": False,
}
TEXT = {
    "architectures": ["CLIPTextModel"],
    "hidden_act": "quick_gelu",
    "hidden_size": 64,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 77,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 49408,
    "eos_token_id": 49407,
}


class TinyClip(comfy.sd1_clip.SDClipModel):
    def __init__(self, **kwargs):
        super().__init__(
            **{**kwargs, "textmodel_json_config": TEXT, "layer": "last", "layer_idx": None}
        )


TextModel = functools.partial(comfy.sd1_clip.SD1ClipModel, clip_model=TinyClip)


class TinySD(comfy.supported_models.SD15):
    unet_config = UNET

    def clip_target(self, state_dict=None):
        return supported_models_base.ClipTarget(TinyTokenizer, TextModel)


class ShortTokenizer(comfy.sd1_clip.SDTokenizer):
    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "embedding_size": 64})


class TinyTokenizer(comfy.sd1_clip.SD1Tokenizer):
    def __init__(self, embedding_directory=None, tokenizer_data=None):
        super().__init__(embedding_directory, tokenizer_data or {}, tokenizer=ShortTokenizer)


def write(path):
    torch.manual_seed(0)
    config = TinySD({**WHOLE, "dtype": torch.float32})
    config.custom_operations = comfy.ops.disable_weight_init
    parts = {
        "model.diffusion_model.": model_base.BaseModel(config, device="cpu").diffusion_model,
        "cond_stage_model.": TextModel(device="cpu", dtype=torch.float32).clip_l,
        "first_stage_model.": comfy.taesd.taesd.TAESD(),
    }
    weights = {}
    for prefix, module in parts.items():
        for name, tensor in module.state_dict().items():
            scale = 0.1 if tensor.dim() > 1 else 0.02
            weights[prefix + name] = (
                torch.randn(tensor.shape) * scale if tensor.is_floating_point() else tensor
            )
    comfy.utils.save_torch_file(weights, path)


comfy.supported_models.models.insert(0, TinySD)
write(folder_paths.get_folder_paths("checkpoints")[0] + "/tiny.safetensors")
NODE_CLASS_MAPPINGS = {}
