"""Settings for the whole suite: nothing goes to a network, two-core machines are not oversubscribed."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import torch
from diffusers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()
