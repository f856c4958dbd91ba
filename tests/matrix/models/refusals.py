"""Models that are refused, built so that the reason shows in their own code."""

from __future__ import annotations

import torch

from tests.builders.transformers import HEADS, IMAGE, normal
from tests.matrix.models.case import case
from tests.matrix.models.images import STEP, WORDS
from tests.matrix.models.videos import VIDEO, WAN, T, frames_first

SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    **HEADS,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 16,
}
SOUND = 24  # samples of sound
RESIDUES = 11  # of a protein, each a point in space


def sound(**more: object) -> object:
    return lambda: {
        "hidden_states": normal(2, SOUND, 8),
        "encoder_hidden_states": WORDS,
        "timestep": torch.tensor([0.5, 0.5]),
        **more,
    }


# By the kind of reason.
LINEAR = [
    case(
        "SanaTransformer2DModel",
        lambda: {"hidden_states": IMAGE, "encoder_hidden_states": WORDS, **STEP},
        **SANA,
        sample_size=16,
    ),
    case(
        "SanaControlNetModel",
        lambda: {
            "hidden_states": IMAGE,
            "encoder_hidden_states": WORDS,
            "controlnet_cond": IMAGE,
            **STEP,
        },
        **SANA,
        sample_size=16,
    ),
    case(
        "SanaVideoTransformer3DModel",
        lambda: {"hidden_states": VIDEO, "encoder_hidden_states": WORDS, **STEP},
        **SANA,
        sample_size=16,
        rope_max_seq_len=32,
    ),
]
SPARSE = [
    case(
        "AnyFlowFARTransformer3DModel",
        lambda: {
            "hidden_states": frames_first(VIDEO),
            "encoder_hidden_states": WORDS,
            "timestep": torch.full((2, T), 500.0),
            "r_timestep": torch.full((2, T), 250.0),
            "chunk_partition": [1, 2],
        },
        **WAN,
        compressed_patch_size=(1, 4, 4),
        full_chunk_limit=3,
    ),
    case(
        "Kandinsky6SRTransformer3DModel",
        lambda: {"hidden_states": normal(1, 2, 16, 16, 9), "timestep": torch.tensor([500.0])},
        num_visual_blocks=1,
        nabla_window=(3, 3, 3),
    ),
]
SOUNDS = [
    case(
        "AceStepTransformer1DModel",
        sound(
            timestep_r=torch.tensor([0.5, 0.5]),
            encoder_hidden_states=normal(2, 7, 32),
            context_latents=normal(2, SOUND, 16),
        ),
        num_hidden_layers=1,
        head_dim=16,
        in_channels=24,
        audio_acoustic_hidden_dim=8,
        patch_size=2,
        sliding_window=16,
    ),
    case(
        "LongCatAudioDiTTransformer",
        sound(
            encoder_attention_mask=torch.ones(2, 7, dtype=torch.bool),
            attention_mask=torch.ones(2, SOUND, dtype=torch.bool),
        ),
        dit_dim=32,
        dit_depth=1,
        dit_heads=2,
        dit_text_dim=16,
        latent_dim=8,
        text_conv=False,
    ),
    case(
        "MiniMaxMusic3Transformer1DModel",
        lambda: {
            "hidden_states": normal(2, 8, SOUND),
            "encoder_hidden_states": normal(2, SOUND, 16),
            "timestep": torch.full((2,), 0.5),
        },
        in_channels=8,
        condition_dim=16,
        num_layers=1,
        attention_head_dim=8,
        ff_inner_dim=32,
        rotary_dim=4,
        fourier_embedding_dim=8,
    ),
    case(
        "MiniMaxMusic3RVQDepthDecoder",
        lambda: {"inputs_embeds": normal(2, 8, 32)},
        hidden_size=32,
        num_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        audio_vocab_size=16,
    ),
    case(
        "StableAudioDiTModel",
        lambda: {
            "hidden_states": normal(2, 8, SOUND),
            "encoder_hidden_states": WORDS,
            "global_hidden_states": normal(2, 1, 16),
            "timestep": torch.tensor([5, 5]),
        },
        sample_size=SOUND,
        in_channels=8,
        out_channels=8,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=16,
        cross_attention_input_dim=16,
    ),
    case(
        "StableAudio3DiTModel",
        lambda: {
            "hidden_states": normal(2, 8, SOUND),
            "encoder_hidden_states": WORDS,
            "global_hidden_states": normal(2, 12),
            "timestep": torch.tensor([0.5, 0.5]),
        },
        io_channels=8,
        embed_dim=32,
        depth=1,
        num_heads=2,
        cond_token_dim=16,
        global_cond_dim=12,
        local_add_cond_dim=5,
        timestep_features_dim=16,
        ff_mult=2,
        num_memory_tokens=3,
        use_differential_attention=False,
    ),
    case(
        "T5FilmDecoder",
        lambda: {
            "encodings_and_masks": [(normal(2, 7, 16), torch.ones(2, 7))],
            "decoder_input_tokens": normal(2, SOUND, 8),
            "decoder_noise_time": torch.tensor([0.5, 0.5]),
        },
        input_dims=8,
        targets_length=SOUND,
        d_model=16,
        num_layers=1,
        num_heads=2,
        d_kv=8,
        d_ff=32,
    ),
    case(
        "UNet1DModel",
        lambda: {"sample": normal(2, 2, SOUND), "timestep": 1},
        extra_in_channels=64,  # of the timestep
        block_out_channels=(32, 32),
        down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
    ),
]
OTHERS = [
    case(
        "PriorTransformer",
        lambda: {
            "hidden_states": normal(2, 8),
            "timestep": 2,
            "proj_embedding": normal(2, 8),
            "encoder_hidden_states": normal(2, 7, 8),
        },
        attention_head_dim=4,
        num_layers=1,
        embedding_dim=8,
        num_embeddings=7,
        additional_embeddings=4,
    ),
    case(
        "TransformerTemporalModel",
        lambda: {"hidden_states": normal(2 * T, 16, 8, 12), "num_frames": T},
        attention_head_dim=8,
        in_channels=16,
        num_layers=1,
        norm_num_groups=1,
        out_channels=None,
        cross_attention_dim=None,
    ),
    case(
        "RFD4ProteinaTransformer",
        lambda: {
            "bb_ca": normal(2, RESIDUES, 3),
            "local_latents": normal(2, RESIDUES, 8),
            "bb_ca_time": torch.tensor([0.5, 0.5]),
            "local_latents_time": torch.tensor([0.5, 0.5]),
            "padding_mask": torch.ones(2, RESIDUES, dtype=torch.bool),
            "conditioning": {
                name: torch.zeros(2, RESIDUES, dtype=torch.bool)
                for name in ("is_in_context_conditioning", "supports_local_latent")
            },
        },
        nlayers=1,
        token_dim=16,
        nheads=2,
        dim_cond=8,
        pair_repr_dim=8,
        latent_dim=8,
        t_emb_dim=8,
        feats_seq=("xt_bb_ca", "xt_local_latents"),
        feats_cond_seq=("time_emb_bb_ca",),
        feats_pair_repr=("xt_bb_ca_pair_dists",),
        feats_pair_cond=("time_emb_bb_ca",),
        tri_mult_c=8,
    ),
]
