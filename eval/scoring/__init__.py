"""Scores of run folders and image folders."""
