"""Generating images: models, prompt files, jobs, run folders that resume."""
