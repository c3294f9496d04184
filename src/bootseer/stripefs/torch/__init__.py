"""Checkpoints of torch jobs: modules that import torch, or that only its ranks use."""
