"""Fewer visual tokens for a language model: merging behind the vision tower of
LLaVA, LLaVA-NeXT, Qwen2-VL and Qwen2.5-VL.
"""
