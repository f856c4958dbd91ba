"""Two small diffusion transformers trained on photographs, merged like published models.

`photographs` makes images of 1,024 tokens, `video` clips of 2,048.

    instrument = load_instrument("photographs")
    images = sample(instrument, conditions("photographs")[:4], steps=8, guidance=2.0, seed=0)

`scripts/training/train_photographs.py` trained them. Their `model` is a class of diffusers, so that
`mame_sd.apply_mame` accepts it as it is. `edits.py` has a third one, which edits drawn pictures.
"""
