"""Transformers of videos."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.builders.transformers import TEXT, H, W, normal
from tests.matrix.models.case import BLC, VIDEO, WORDS, T, case, rotations

BCTHW = "hidden_states BCTHW"


def masked(**more: Any) -> Any:
    """Return inputs with a shorter text in the second sample."""
    mask = torch.ones(2, TEXT)
    mask[1, -2:] = 0
    return lambda: {"encoder_attention_mask": mask, **more}


def frame_times() -> dict[str, Any]:
    """AnyFlow: each frame has its timestep."""
    return {"timestep": torch.full((2, T), 500.0), "r_timestep": torch.full((2, T), 250.0)}


def history() -> dict[str, Any]:
    """FramePack: frames that are there already before those that are made."""
    return {
        **masked()(),
        "guidance": torch.ones(2),
        "image_embeds": normal(2, 3, 16),
        "indices_latents": torch.arange(T).float(),
        "latents_clean": normal(2, 4, 2, 2 * H, 2 * W),
        "indices_latents_clean": torch.ones(2),
        "latents_history_2x": normal(2, 4, 2, 2 * H, 2 * W),
        "indices_latents_history_2x": torch.ones(2),
        "latents_history_4x": normal(2, 4, 4, 2 * H, 2 * W),
        "indices_latents_history_4x": torch.ones(4),
    }


def helios() -> dict[str, Any]:
    return {
        "indices_hidden_states": torch.arange(T).float().expand(2, -1),
        "indices_latents_history_short": torch.ones(2, 1),
        "latents_history_short": normal(2, 4, 1, 2 * H, 2 * W),
    }


def minimax() -> dict[str, Any]:
    """Text, sound and a video in one sequence."""
    sound, n = 5, T * H * W
    total = TEXT + sound + n
    ids = torch.zeros(total, 3)
    ids[:TEXT, 0] = torch.arange(TEXT)
    ids[TEXT + sound :] = torch.cartesian_prod(*(torch.arange(k).float() for k in (T, H, W)))
    tags = torch.tensor([1] * TEXT + [2] * sound + [0] * n)
    return {
        "hidden_states": normal(2, n, 16),
        "audio_hidden_states": normal(2, sound, 6),
        "encoder_hidden_states": WORDS,
        "timestep": torch.tensor([0.5, 0.5]),
        "timestep_indices": torch.zeros(total, dtype=torch.long),
        "token_tags": tags,
        "position_ids": ids,
        "text_indices": torch.arange(TEXT),
        "audio_indices": torch.arange(TEXT, TEXT + sound),
        "video_indices": torch.arange(TEXT + sound, total),
    }


def cosmos3() -> dict[str, Any]:
    n = T * H * W
    at = torch.arange(TEXT, TEXT + n)
    ids = torch.zeros(3, TEXT + n, dtype=torch.long)
    ids[:, TEXT:] = torch.cartesian_prod(*(torch.arange(k) for k in (T, H, W))).T
    return {
        "input_ids": torch.arange(TEXT),
        "text_indexes": torch.arange(TEXT),
        "position_ids": ids,
        "und_len": TEXT,
        "sequence_length": TEXT + n,
        "vision_tokens": [normal(1, 4, T, H, W)],
        "vision_token_shapes": [(T, H, W)],
        "vision_sequence_indexes": at,
        "vision_mse_loss_indexes": at,
        "vision_timesteps": torch.ones(n),
        "vision_noisy_frame_indexes": [torch.arange(T)],
    }


COSMOS_CONTROL = case(
    "CosmosControlNetModel",
    lambda: {
        "controls_latents": VIDEO,
        "latents": VIDEO,
        "condition_mask": torch.ones(2, 1, T, 2 * H, 2 * W),
    },
    "controls_latents BCTHW",
    n_controlnet_blocks=2,
    in_channels=6,
    latent_channels=6,
    model_channels=48,
    attention_head_dim=24,
    max_size=(4, 32, 32),
)


def cosmos_control() -> nn.Module:
    """Build a ControlNet of Cosmos, which resizes its padding mask by torchvision."""
    from diffusers.models.controlnets import controlnet_cosmos

    if not hasattr(controlnet_cosmos, "transforms"):
        controlnet_cosmos.transforms = SimpleNamespace(
            functional=SimpleNamespace(resize=lambda mask, size, **_: F.interpolate(mask, size)),
            InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        )
    return COSMOS_CONTROL.build()


def allegro() -> dict[str, Any]:
    """With the table of rotations and each token's place in it, as the pipeline gives them."""
    table = tuple(rotations(n, 8) for n in (T, H, W))
    places = torch.cartesian_prod(*(torch.arange(n) for n in (T, H, W))).T
    return {"image_rotary_emb": (table, tuple(place[None] for place in places))}


CASES = [
    case("WanTransformer3DModel", image=BCTHW),
    case(
        "LTXVideoTransformer3DModel",
        lambda: {
            "hidden_states": normal(2, 3 * H * W, 4),
            "encoder_attention_mask": torch.ones(2, TEXT),
        },
        BLC,
    ),
    case(
        "CogVideoXTransformer3DModel",
        lambda: {"image_rotary_emb": rotations(T * H * W)},
        "hidden_states BTCHW",
        sample_width=2 * W,
        sample_height=2 * H,
        max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=True,
    ),
    case(
        "WanVACETransformer3DModel",
        lambda: {"control_hidden_states": normal(2, 8, T, 2 * H, 2 * W)},
        BCTHW,
        vace_layers=[0],
        vace_in_channels=8,
    ),
    case(
        "WanAnimateTransformer3DModel",
        lambda: {
            "hidden_states": normal(2, 12, T, 2 * H, 2 * W),
            "pose_hidden_states": normal(2, 4, T - 1, 2 * H, 2 * W),
            "face_pixel_values": normal(2, 3, 5, 16, 16),
            "encoder_hidden_states": normal(2, 512, 16),
            "encoder_hidden_states_image": normal(2, 4, 16),
        },
        BCTHW,
        in_channels=12,
        latent_channels=4,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16,
        inject_face_latents_blocks=2,
    ),
    case("ChronoEditTransformer3DModel", image=BCTHW),
    case("SkyReelsV2Transformer3DModel", image=BCTHW),
    case("AnyFlowTransformer3DModel", frame_times, "hidden_states BTCHW"),
    case("HeliosTransformer3DModel", helios, BCTHW, rope_dim=(4, 4, 8)),
    case(
        "AllegroTransformer3DModel",
        allegro,
        BCTHW,
        attention_head_dim=24,
        cross_attention_dim=48,
        sample_frames=T,
    ),
    case("CosmosTransformer3DModel", image=BCTHW, attention_head_dim=24, concat_padding_mask=False),
    replace(COSMOS_CONTROL, build=cosmos_control),
    case(
        "LTX2VideoTransformer3DModel",
        lambda: {
            "hidden_states": normal(2, T * H * W, 4),
            "audio_hidden_states": normal(2, 9, 4),
            "audio_encoder_hidden_states": WORDS,
            "encoder_attention_mask": torch.ones(2, TEXT, dtype=torch.bool),
            "audio_num_frames": 9,
        },
        BLC,
        audio_in_channels=4,
        audio_attention_head_dim=8,
        rope_double_precision=False,
    ),
    case(
        "SanaWMLTX2RefinerTransformer3DModel",
        lambda: {
            "hidden_states": normal(2, T * H * W, 4),
            "video_rotary_emb": [t.expand(2, -1, -1) for t in rotations(T * H * W, 32)],
        },
        BLC,
    ),
    case("HunyuanVideoTransformer3DModel", masked(guidance=torch.ones(2)), BCTHW, num_layers=1),
    case(
        "HunyuanVideoFramepackTransformer3DModel",
        history,
        BCTHW,
        num_layers=1,
        has_image_proj=True,
        has_clean_x_embedder=True,
    ),
    case(
        "HunyuanVideo15Transformer3DModel",
        masked(
            hidden_states=normal(2, 4, T, H, W),
            encoder_hidden_states_2=normal(2, 4, 16),
            encoder_attention_mask_2=torch.ones(2, 4),
            image_embeds=torch.zeros(2, 3, 16),
        ),
        BCTHW,
        num_layers=1,
        task_type="t2v",
    ),
    case(
        "HunyuanImageTransformer2DModel",
        masked(hidden_states=normal(2, 4, H, W)),
        num_layers=1,
        rope_axes_dim=(8, 8),
    ),
    case(
        "MotifVideoTransformer3DModel",
        masked(),
        BCTHW,
        num_layers=1,
        enable_text_cross_attention_dual=True,
    ),
    case("MochiTransformer3DModel", masked(), BCTHW, max_sequence_length=TEXT),
    case("EasyAnimateTransformer3DModel", image=BCTHW, patch_size=2),
    case(
        "ConsisIDTransformer3DModel",
        lambda: {
            "image_rotary_emb": rotations(T * H * W),
            "id_vit_hidden": [torch.ones(2, 5, 4)],
            "id_cond": torch.ones(2, 8),
        },
        "hidden_states BTCHW",
        sample_width=2 * W,
        sample_height=2 * H,
        max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        LFE_id_dim=8,
        LFE_vit_dim=4,
        LFE_output_dim=21,
        LFE_num_scale=1,
    ),
    case(
        "JoyImageEditTransformer3DModel",
        lambda: {"hidden_states": normal(2, 2, 4, 1, 2 * H, 2 * W)},
        "hidden_states BNCTHW",
        rope_dim_list=[4, 4, 8],
    ),
    case(
        "Kandinsky5Transformer3DModel",
        lambda: {
            "visual_rope_pos": [torch.arange(T), torch.arange(H), torch.arange(W)],
            "text_rope_pos": torch.arange(TEXT),
        },
        "hidden_states BTHWC",
        in_text_dim2=8,
        num_visual_blocks=2,
    ),
    case(
        "Kandinsky6Transformer3DModel",
        lambda: {"audio_hidden_states": normal(2, 6, 4)},
        "hidden_states BTHWC",
        in_text_dim2=8,
        num_visual_blocks=2,
        visual_cond=False,
        in_audio_dim=4,
    ),
    case(
        "LatteTransformer3DModel",
        lambda: {
            "hidden_states": VIDEO,
            "timestep": torch.tensor([[5], [5]]).flatten(),
            "enable_temporal_attentions": True,
        },
        image="",
        patch_size=2,
        attention_bias=True,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        video_length=T,
    ),
    case(
        "MiniMaxH3Transformer3DModel",
        minimax,
        BLC,
        audio_in_channels=6,
        rope_freq_dim=2,
    ),
    case(
        "Cosmos3OmniTransformer",
        cosmos3,
        "vision_tokens BCTHW",
        latent_channel=4,
        latent_patch_size=1,
        num_hidden_layers=2,
        patch_latent_dim=4,
        rope_axes_dim=[2, 3, 3],
        vocab_size=32,
    ),
]
