"""Tests with other people's libraries: one file a library, left out with a word where it is not installed."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made from configs, with random weights
