"""Tokens to merge, and a tokenizer of words."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw tokens of a few directions with noise, so that only some pairs are similar."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, shape[-1], generator=generator)
    pick = torch.randint(0, 4, shape[:-1], generator=generator)
    return (centres[pick] + 0.7 * torch.randn(*shape, generator=generator)).to(dtype)


def word_tokenizer(words: list[str], **special: object) -> PreTrainedTokenizerFast:
    """Make a tokenizer of these words with spaces between; "<unk>" must be one."""
    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **special)
