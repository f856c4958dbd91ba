"""Measure vision transformers: rivals of merging, speed, accuracy, and a report."""
