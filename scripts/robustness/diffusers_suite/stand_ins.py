"""Local stand-ins for the tiny models that diffusers' tests load from the hub: same names, same
sizes, random weights.

`from_pretrained("hf-internal-testing/tiny-random-clip")` takes a folder of that name where there is
one, so the stand-ins lie below the folder that the tests run in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


def save_clip(folder: Path) -> None:
    clip_tokenizer().save_pretrained(folder)
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": 1000}
    CLIPModel(
        CLIPConfig(text_config={**SMALL, **ends}, vision_config=SMALL, projection_dim=32)
    ).save_pretrained(folder)


def save_clip_text(folder: Path) -> None:
    clip_tokenizer().save_pretrained(folder)
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": 1000}
    config = CLIPTextConfig(**SMALL, **ends, projection_dim=32, hidden_act="gelu")
    CLIPTextModelWithProjection(config).save_pretrained(folder)


def save_t5(folder: Path) -> None:
    t5_tokenizer().save_pretrained(folder)
    T5EncoderModel(T5Config(**T5)).save_pretrained(folder)


def save_umt5(folder: Path) -> None:
    t5_tokenizer().save_pretrained(folder)
    UMT5EncoderModel(UMT5Config(**T5)).save_pretrained(folder)


def save_bert(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(33, 127))]
    (folder / "vocab.txt").write_text(
        "\n".join([*words, *("##" + word for word in words[5:])]), encoding="utf-8"
    )
    BertTokenizer(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    BertModel(BertConfig(**SMALL, vocab_size=1124)).save_pretrained(folder)


def save_characters(folder: Path) -> None:
    """A tokenizer alone, over single characters."""
    t5_tokenizer().save_pretrained(folder)


def save_llama_tokenizer(folder: Path) -> None:
    save_characters(folder / "tokenizer")
    (folder / "config.json").write_text("{}", encoding="utf-8")


def save_llama(folder: Path) -> None:
    save_characters(folder)
    config = LlamaConfig(**{**SMALL, "hidden_size": 16}, vocab_size=1000, num_key_value_heads=4)
    LlamaForCausalLM(config).save_pretrained(folder)


def save_siglip(folder: Path) -> None:
    SiglipImageProcessor(size={"height": 30, "width": 30}).save_pretrained(folder)
    SiglipVisionModel(SiglipVisionConfig(**SMALL, image_size=30, patch_size=2)).save_pretrained(
        folder
    )


def save_gemma(folder: Path) -> None:
    save_characters(folder)
    config = Gemma3Config(
        text_config={**TEXT, "hidden_size": 32, "head_dim": 8, "vocab_size": 1000},
        vision_config={**SMALL, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def save_qwen_tokenizer(folder: Path) -> None:
    vocabulary = {c: i for i, c in enumerate(byte_characters())}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=CHAT).save_pretrained(folder)


def save_cosmos(folder: Path) -> None:
    save_qwen_tokenizer(folder / "text_tokenizer")


def save_qwen3(folder: Path) -> None:
    save_qwen_tokenizer(folder)
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_scaling": rope, "vocab_size": 1000},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
            "deepstack_visual_indexes": [0],
        },
        **ENDS,
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)


def save_qwen(folder: Path) -> None:
    save_qwen_tokenizer(folder)
    text = {
        **TEXT,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        "rope_theta": 1e6,
        "vocab_size": 1000,
    }
    image = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=image, **ENDS)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


STAND_INS: dict[str, Callable[[Path], None]] = {
    "hf-internal-testing/tiny-random-clip": save_clip,
    "peft-internal-testing/tiny-clip-text-2": save_clip_text,
    "hf-internal-testing/tiny-sd3-text_encoder": save_clip_text,
    "hf-internal-testing/tiny-sd3-text_encoder-2": save_clip_text,
    "hf-internal-testing/tiny-random-t5": save_t5,
    "hf-internal-testing/tiny-random-umt5": save_umt5,
    "hf-internal-testing/tiny-random-T5Model": save_t5,
    "hf-internal-testing/tiny-random-roberta": save_t5,
    "YiYiXu/tiny-random-mclip-base": save_t5,
    "hf-internal-testing/dummy-gemma": save_t5,
    "hf-internal-testing/llama-tokenizer": save_t5,
    "finetrainers/dummy-hunyaunvideo": save_llama_tokenizer,
    "hf-internal-testing/tiny-random-LlamaForCausalLM": save_llama,
    "hf-internal-testing/tiny-random-SiglipVisionModel": save_siglip,
    "hf-internal-testing/tiny-random-BertModel": save_bert,
    "hf-internal-testing/tiny-random-Qwen25VLForCondGen": save_qwen,
    "hf-internal-testing/tiny-random-Qwen2VLForConditionalGeneration": save_qwen,
    "hf-internal-testing/tiny-gemma3": save_gemma,
    "hf-internal-testing/tiny-cosmos3-modular-pipe": save_cosmos,
    "THUDM/glm-4-9b-chat": save_characters,
    "huangfeice/tiny-random-Qwen3VLForConditionalGeneration": save_qwen3,
}


def save_stand_ins(folder: Path) -> None:
    """Saves those that are missing below `folder`, from fixed seeds."""
    for name, save in STAND_INS.items():
        if not (folder / name / "config.json").is_file():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                save(folder / name)
