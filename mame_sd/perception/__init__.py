"""MaMe in vision transformers: merging between attention and MLP, later blocks see fewer tokens."""
