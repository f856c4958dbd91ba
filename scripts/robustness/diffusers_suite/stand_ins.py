"""Local stand-ins for the tiny models that diffusers' tests load from the hub: same names, same
sizes, random weights.

`from_pretrained("hf-internal-testing/tiny-random-clip")` takes a folder of that name where there is
one, so the stand-ins lie below the folder that the tests run in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
T5 = {
    "d_model": 32,
    "d_ff": 37,
    "d_kv": 8,
    "num_layers": 5,
    "num_heads": 4,
    "vocab_size": 1103,
    "decoder_start_token_id": 0,
    # a test makes its text encoder in training mode, and would see another prompt in every call
    "dropout_rate": 0.0,
}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ENDS = {
    "image_token_id": 995,
    "video_token_id": 996,
    "vision_start_token_id": 997,
    "vision_end_token_id": 998,
}


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)


ROPE = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
}
CLIP_TEXT = {**SMALL, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": 1000}


def byte_characters() -> list[str]:
    """What byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]


def clip_tokenizer() -> CLIPTokenizer:
    """Over single bytes, fewer than 1000 tokens, as the tests' own text encoders are made for."""
    characters = byte_characters()
    tokens = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """Over single characters, with T5's special tokens."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)


def bert_tokenizer() -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(33, 127))]
    words += ["##" + word for word in words[5:]]
    vocabulary = {word: number for number, word in enumerate(words)}
    return BertTokenizer(vocab=vocabulary, model_max_length=512)


def qwen_tokenizer() -> Qwen2Tokenizer:
    vocabulary = {c: i for i, c in enumerate(byte_characters())}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=CHAT)


def clip() -> CLIPModel:
    return CLIPModel(CLIPConfig(text_config=CLIP_TEXT, vision_config=SMALL, projection_dim=32))


def clip_text() -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(**CLIP_TEXT, projection_dim=32, hidden_act="gelu")
    return CLIPTextModelWithProjection(config)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(**{**SMALL, "hidden_size": 16}, vocab_size=1000, num_key_value_heads=4)
    return LlamaForCausalLM(config)


def gemma() -> Gemma3ForConditionalGeneration:
    config = Gemma3Config(
        text_config={**TEXT, "hidden_size": 32, "head_dim": 8, "vocab_size": 1000},
        vision_config={**SMALL, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    return Gemma3ForConditionalGeneration(config)


def qwen3() -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_scaling": {**ROPE}, "vocab_size": 1000},
        vision_config={**VISION, "deepstack_visual_indexes": [0]},
        **ENDS,
    )
    return Qwen3VLForConditionalGeneration(config)


def qwen() -> Qwen2_5_VLForConditionalGeneration:
    text = {**TEXT, "rope_scaling": {**ROPE}, "rope_theta": 1e6, "vocab_size": 1000}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=VISION, **ENDS)
    return Qwen2_5_VLForConditionalGeneration(config)


# What is saved together: a model and its tokenizer, or one of them.
Parts = tuple[Callable[[], Any], ...]
CLIP: Parts = (clip_tokenizer, clip)
CLIP_ALONE: Parts = (clip_tokenizer, clip_text)
T5_TEXT: Parts = (t5_tokenizer, lambda: T5EncoderModel(T5Config(**T5)))
QWEN: Parts = (qwen_tokenizer, qwen)
STAND_INS: dict[str, Parts] = {
    "hf-internal-testing/tiny-random-clip": CLIP,
    "peft-internal-testing/tiny-clip-text-2": CLIP_ALONE,
    "hf-internal-testing/tiny-sd3-text_encoder": CLIP_ALONE,
    "hf-internal-testing/tiny-sd3-text_encoder-2": CLIP_ALONE,
    "hf-internal-testing/tiny-random-t5": T5_TEXT,
    "hf-internal-testing/tiny-random-umt5": (
        t5_tokenizer,
        lambda: UMT5EncoderModel(UMT5Config(**T5)),
    ),
    "hf-internal-testing/tiny-random-T5Model": T5_TEXT,
    "hf-internal-testing/tiny-random-roberta": T5_TEXT,
    "YiYiXu/tiny-random-mclip-base": T5_TEXT,
    "hf-internal-testing/dummy-gemma": T5_TEXT,
    "hf-internal-testing/llama-tokenizer": T5_TEXT,
    "finetrainers/dummy-hunyaunvideo/tokenizer": (t5_tokenizer,),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": (t5_tokenizer, llama),
    "hf-internal-testing/tiny-random-SiglipVisionModel": (
        lambda: SiglipImageProcessor(size={"height": 30, "width": 30}),
        lambda: SiglipVisionModel(SiglipVisionConfig(**SMALL, image_size=30, patch_size=2)),
    ),
    "hf-internal-testing/tiny-random-BertModel": (
        bert_tokenizer,
        lambda: BertModel(BertConfig(**SMALL, vocab_size=1124)),
    ),
    "hf-internal-testing/tiny-random-Qwen25VLForCondGen": QWEN,
    "hf-internal-testing/tiny-random-Qwen2VLForConditionalGeneration": QWEN,
    "hf-internal-testing/tiny-gemma3": (t5_tokenizer, gemma),
    "hf-internal-testing/tiny-cosmos3-modular-pipe/text_tokenizer": (qwen_tokenizer,),
    "THUDM/glm-4-9b-chat": (t5_tokenizer,),
    "huangfeice/tiny-random-Qwen3VLForConditionalGeneration": (qwen_tokenizer, qwen3),
}


def save_stand_ins(folder: Path) -> None:
    """Saves those that are missing below `folder`, from fixed seeds."""
    for name, parts in STAND_INS.items():
        if not (folder / name).is_dir():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                for part in parts:
                    part().save_pretrained(folder / name)
