"""Canonical JSON: sorted keys, no spaces, ASCII with escapes (so that undecodable file names survive)."""

from __future__ import annotations

import hashlib
import json

_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical(value: object) -> bytes:
    return _encoder.encode(value).encode()


def sha256_of(value: object) -> str:
    """SHA-256 (hex) of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value)).hexdigest()
