"""Rows of the matrix: what diffusers users switch on around a Stable Diffusion pipeline."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import diffusers
import gguf
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor

from tests.builders.pipelines import SIDE, once, quiet, sd, sdxl
from tests.builders.tiny import TEXT_DIM, tiny_pipeline, tiny_unet, unet_inputs
from tests.matrix.rows import Row
from tests.matrix.unets import LEVELS


@cache
def lora() -> dict[str, Tensor]:
    """Weights of a LoRA on every attention of tiny_unet, as `load_lora_weights` takes them."""
    unet = tiny_unet()
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        unet.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    return {f"unet.{name}": value for name, value in get_peft_model_state_dict(unet).items()}


def load_lora(pipe: Any) -> None:
    pipe.load_lora_weights({name: value.clone() for name, value in lora().items()})


def unload_lora(pipe: Any) -> None:
    pipe.unload_lora_weights()


def unfuse_lora(pipe: Any) -> None:
    load_lora(pipe)
    pipe.fuse_lora()
    pipe.unfuse_lora()


@cache
def ip_adapter() -> dict[str, dict[str, Tensor]]:
    """Weights of an IP-Adapter of four image tokens for tiny_unet."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    crosses = [module for name, module in tiny_unet().named_modules() if name.endswith("attn2")]
    for i, attn in enumerate(crosses):
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * i + 1}.{part}.weight"] = torch.randn(
                attn.inner_dim, TEXT_DIM, generator=generator
            )
    projection = {
        "proj.weight": torch.randn(4 * TEXT_DIM, TEXT_DIM, generator=generator),
        "proj.bias": torch.zeros(4 * TEXT_DIM),
        "norm.weight": torch.ones(TEXT_DIM),
        "norm.bias": torch.zeros(TEXT_DIM),
    }
    return {"image_proj": projection, "ip_adapter": weights}


def load_ip_adapter(pipe: Any) -> None:
    pipe.load_ip_adapter(ip_adapter(), subfolder="", weight_name="", image_encoder_folder=None)


def with_image(pipe: Any) -> Tensor:
    """One step, with an image prompt where an IP-Adapter is loaded."""
    if pipe.unet.encoder_hid_proj is None:
        return once(pipe)
    image = torch.randn(2, 1, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    return once(pipe, ip_adapter_image_embeds=[image])


def pag(**changes: Any) -> Any:
    return sd("StableDiffusionPAGPipeline", pag_applied_layers=["mid"], **changes)


def gguf_pipeline() -> Any:
    """Make a pipeline with the second level's linear layers in GGUF's Q8_0 (blocks of 32)."""
    pipe = tiny_pipeline()
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, linear in [*pipe.unet.named_modules()]:
        if (
            isinstance(linear, torch.nn.Linear)
            and linear.in_features % 32 == 0
            and ".attentions." in name
        ):
            packed = torch.from_numpy(gguf.quantize(linear.weight.detach().numpy(), kind))
            with_bias = linear.bias is not None
            small = GGUFLinear(linear.in_features, linear.out_features, with_bias, torch.float32)
            small.weight, small.bias = GGUFParameter(packed, quant_type=kind), linear.bias
            pipe.unet.set_submodule(name, small)
    return pipe


def quanto_pipeline() -> Any:
    """All linear weights of the UNet in 8 bits by quanto."""
    from optimum.quanto import freeze, qint8, quantize

    pipe = tiny_pipeline()
    quantize(pipe.unet, weights=qint8)
    freeze(pipe.unet)
    return pipe


def trained(pipe: Any) -> Tensor:
    """Gradients of one training step, every one of them in a row."""
    unet = pipe.unet
    unet.train()
    unet.zero_grad()
    target = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(9))
    torch.nn.functional.mse_loss(unet(**unet_inputs(unet)).sample, target).backward()
    return torch.cat([p.grad.flatten() for p in unet.parameters() if p.grad is not None])


def modular() -> Any:
    """Make the tiny SDXL as a Modular Diffusers pipeline."""
    parts = sdxl().components
    pipe = diffusers.StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.update_components(**{name: part for name, part in parts.items() if part is not None})
    return quiet(pipe)


def run_modular(pipe: Any) -> Tensor:
    call = {"prompt": "a red key", "height": SIDE, "width": SIDE, "num_inference_steps": 1}
    generator = torch.Generator().manual_seed(0)
    images: Tensor = pipe(**call, generator=generator, output_type="pt", output="images")
    return images


CPU = torch.device("cpu")
BY_LAYER = {"by layer": {"keep": 0.5, "layers": {"up_blocks": {"tau": -1.0}}}}
features = partial(Row, build=tiny_pipeline, run=once, merges=LEVELS)
ROWS = [
    features("LoRA: load", switch=load_lora, undo=unload_lora, processor="same"),
    features(
        "LoRA: fuse, then unfuse", switch=unfuse_lora, undo=unload_lora, exact=False, sweep=True
    ),
    features(
        "IP-Adapter",
        run=with_image,
        switch=load_ip_adapter,
        undo=lambda pipe: pipe.unload_ip_adapter(),
        processor="reset",
    ),
    features(
        "IP-Adapter, then the one-liner", run=with_image, switch=load_ip_adapter, processor="error"
    ),
    Row("PAG", pag, partial(once, pag_scale=2.0), LEVELS, one_liner="not on perturbed layers"),
    features(
        "FreeU",
        switch=lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
        undo=lambda pipe: pipe.disable_freeu(),
    ),
    features(
        "attention slicing",
        switch=lambda pipe: pipe.enable_attention_slicing(1),
        undo=lambda pipe: pipe.disable_attention_slicing(),
        exact=False,
        processor="replaced",
    ),
    features(
        "fused QKV",
        switch=lambda pipe: pipe.fuse_qkv_projections(),
        undo=lambda pipe: pipe.unfuse_qkv_projections(),
        exact=False,
        processor="replaced",
    ),
    features(
        "layerwise casting (fp8)",
        switch=lambda pipe: pipe.unet.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
        ),
    ),
    features(
        "group offload",
        switch=lambda pipe: pipe.unet.enable_group_offload(
            onload_device=CPU, offload_device=CPU, offload_type="leaf_level"
        ),
        sweep=True,
        since="0.42",
    ),
    features(
        "model offload",
        switch=lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
        sweep=True,
    ),
    features("quanto int8", build=quanto_pipeline, sweep=True),
    features("GGUF Q8_0", build=gguf_pipeline),
    features(
        "settings by layer",
        modes=BY_LAYER,
        one_liner="error: a processor knows no names of layers",
    ),
    features(
        "gradient checkpointing in training",
        run=trained,
        switch=lambda pipe: pipe.unet.enable_gradient_checkpointing(),
        exact=False,
    ),
    Row("Modular Diffusers (SDXL)", modular, run_modular, {64: 8}),
]
