"""List models of diffusers that do not merge, each with the reason.

A test finds that reason in the model's own code.
"""

from __future__ import annotations

import re

from torch import nn

_LINEAR = "its self-attention is linear in the tokens already, so merging has nothing to save"
_SPARSE = (
    "its attention goes by blocks of keys that the model picks (flex attention): no softmax over"
    " all of them"
)
_NEIGHBOURS = "its attention is over a window around each pixel already, by a block mask"
_SOUND = "its tokens are sound, in a row: there is no image"
_NO_IMAGE = "its tokens are no image's"

# Models for which merging is refused, with the reason.
EXCLUDED = {
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaControlNetModel": _LINEAR,
    "SanaWMTransformer3DModel": (
        "three of four of its layers are linear in the tokens, and the fourth takes no hidden"
        " states"
    ),
    "AnyFlowFARTransformer3DModel": _SPARSE,
    "Kandinsky6SRTransformer3DModel": _SPARSE,
    "WanAnimate2Transformer3DModel": _SPARSE,
    "LTX2VideoDiffusionDecoderModel": _NEIGHBOURS,
    "AceStepTransformer1DModel": _SOUND,
    "LongCatAudioDiTTransformer": _SOUND,
    "MiniMaxMusic3RVQDepthDecoder": _SOUND,
    "MiniMaxMusic3Transformer1DModel": _SOUND,
    "StableAudio3DiTModel": _SOUND,
    "StableAudioDiTModel": _SOUND,
    "T5FilmDecoder": _SOUND,
    "UNet1DModel": _SOUND,
    "PriorTransformer": _NO_IMAGE,
    "RFD4ProteinaTransformer": _NO_IMAGE,
    "TransformerTemporalModel": "its attention is over the frames of each pixel",
}


def refused_as(module: nn.Module) -> str | None:
    """Return the name in `EXCLUDED` of a model's class or of one of its bases, else None."""
    return next((k.__name__ for k in type(module).__mro__ if k.__name__ in EXCLUDED), None)


def known_as(kind: str) -> str:
    """Return a model's usual name for its class: "Flux2Transformer2DModel" is Flux 2."""
    name = re.sub(r"(?<!^)(Transformer|UNet|DiT)([123]D)?(Model)?$", "", kind)
    return re.sub(r"(?<=[a-zA-Z])(?=\d)(?!\dD)|(?<=\d)(?=[A-CE-Z])", " ", name)
