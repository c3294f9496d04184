"""The state dict of bench/checkpoint: tensors of random bytes, sized like a transformer's, as torch.save writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3

MiB = 1 << 20
State = dict[str, torch.Tensor]
LAYER = {"attention": [16 * MiB] * 4, "mlp": [32 * MiB] * 2, "norm": [16 << 10] * 2}
"""Bytes of the tensors of one layer."""


class Made(NamedTuple):
    """A file of torch.save, and the digest of its tensors."""

    path: Path
    digest: str


def make(path: Path, size: int) -> Made:
    """Write a state dict of about ``size`` bytes to ``path``."""
    layers = max(1, round(size / sum(map(sum, LAYER.values()))))
    state = {
        f"layers.{layer}.{part}.{i}": torch.frombuffer(bytearray(os.urandom(length)), dtype=torch.bfloat16)
        for layer in range(layers)
        for part, lengths in LAYER.items()
        for i, length in enumerate(lengths)
    }
    torch.save(state, path)
    return Made(path, digest_of(state))


def make_small(path: Path, count: int) -> Made:
    """Write ``count`` tensors of 1 KiB."""
    data = (bytearray(os.urandom(1024)) for _ in range(count))
    state = {f"layers.{n}.weight": torch.frombuffer(each, dtype=torch.float32) for n, each in enumerate(data)}
    torch.save(state, path)
    return Made(path, digest_of(state))


def digest_of(state: State) -> str:
    """A hash of 64 hex digits of all names and bytes, in the order of the names."""
    found = blake3()
    for name in sorted(state):
        found.update(name.encode())
        found.update(memoryview(state[name].contiguous().view(torch.uint8).numpy()))
    return str(found.hexdigest())
