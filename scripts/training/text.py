"""The text side: a CLIP tokenizer made from the captions, and the UNet's text encoder."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

TEXT_WIDTH = 192
LAST = 0xE000  # start of the private use area of Unicode


def new_tokenizer(captions: list[str], length: int = 77) -> CLIPTokenizer:
    """Return a byte-level BPE in which every word of the captions is one token.

    Any other string is spelt out. Prompts are cut at ``length`` tokens. The trainer's own
    end-of-word suffix makes it break ties randomly; a marked last letter (``LAST`` + the letter)
    doesn't.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = sorted({word for text in captions for word in text.lower().replace("-", " - ").split()})
    marked = [word[:-1] + chr(LAST + ord(word[-1])) for word in words]
    bpe.train_from_iterator(
        marked, trainers.BpeTrainer(vocab_size=20000, min_frequency=1, show_progress=False)
    )

    def unmark(symbol: str) -> str:
        return (
            symbol if ord(symbol[-1]) < LAST else symbol[:-1] + chr(ord(symbol[-1]) - LAST) + "</w>"
        )

    merges = [(unmark(a), unmark(b)) for a, b in json.loads(bpe.to_str())["model"]["merges"]]
    symbols = alphabet + [a + "</w>" for a in alphabet] + ["".join(pair) for pair in merges]
    vocab = {
        symbol: i
        for i, symbol in enumerate(dict.fromkeys([*symbols, "<|startoftext|>", "<|endoftext|>"]))
    }
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def text_config(tokenizer: CLIPTokenizer, width: int, layers: int) -> CLIPTextConfig:
    """Return the config of a text encoder with heads of 64 channels."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        projection_dim=width,
    )


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return the text encoder with random weights."""
    return CLIPTextModel(text_config(tokenizer, TEXT_WIDTH, 3))


def caption_tokens(tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    """Return the tokens of captions."""
    rows: torch.Tensor = tokenizer(
        captions, padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    return rows


class Tokens(dict[str, torch.Tensor]):
    """Tokens of a caption, computed on first use."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, caption: str) -> torch.Tensor:
        self[caption] = caption_tokens(self.tokenizer, [caption])[0]
        return self[caption]
