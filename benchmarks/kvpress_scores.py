"""How far scores of mame_sd.caches are from kvpress', in an environment of its own (kvpress 0.5.5,
transformers 5.2).

    python -m benchmarks.kvpress_scores FOLDER  # with SmolLM2-135M-Instruct.Q4_1.gguf in it
"""

from __future__ import annotations

import sys

import kvpress
import torch
from transformers import AutoModelForCausalLM

from mame_sd.caches import merge_cache
from mame_sd.eval.caches.measure import Recorder
from mame_sd.eval.caches.methods import ExpectedAttention, KeyDiff, SnapKV

TOKENS = 600
PAIRS = (
    ("SnapKV", SnapKV(), kvpress.SnapKVPress(0.5)),
    ("KeyDiff", KeyDiff(), kvpress.KeyDiffPress(0.5)),
    ("expected attention", ExpectedAttention(), kvpress.ExpectedAttentionPress(0.5)),
)


@torch.no_grad()
def main(folder: str) -> None:
    """Prints the largest difference of each method over all layers, as a share of the largest
    score.
    """
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    ids = torch.randint(100, 20000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    recorder = Recorder()
    with merge_cache(model, 0.5, recorder):
        model(ids)
    for name, ours, press in PAIRS:
        worst = 0.0
        for view, layer in zip(recorder.views, model.model.layers, strict=True):
            layer.self_attn.rotary_emb = model.model.rotary_emb
            places = model.model.rotary_emb(view.hidden_states, torch.arange(TOKENS)[None])
            rest = {"position_embeddings": places}
            want = press.score(
                layer.self_attn, view.hidden_states, view.keys, view.values, None, rest
            )
            got = ours.score(view)
            # Keys that stay in any case have a score above all others, which is arbitrary.
            real = (
                torch.ones_like(want, dtype=torch.bool) if name == "KeyDiff" else want < want.max()
            )
            worst = max(worst, float((got - want)[real].abs().max() / want[real].abs().max()))
        print(f"{name}: {worst:.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
