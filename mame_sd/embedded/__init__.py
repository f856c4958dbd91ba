"""Find the embedded models (a folder each, with weights and a model card) and their prompts."""
