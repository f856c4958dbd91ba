"""Give a language model fewer visual tokens: LLaVA, Qwen2-VL and Qwen2.5-VL.

Tokens merge after the vision tower.
"""
