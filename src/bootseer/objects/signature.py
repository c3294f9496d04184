"""Signatures of what the store has of images and environments: Ed25519, with keys in PEM files, of which no message
says anything. What is signed: docs/internals/image.md, "Signatures", and docs/internals/snapshot.md."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.config import Config
from bootseer.errors import ConfigError, DataError, doing, extra
from bootseer.wiretypes import document

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


class UnsignedError(DataError):
    """What must be signed is not, or not by one of the keys that are trusted, or was changed afterwards."""


def signing_key(path: Path) -> Ed25519PrivateKey:
    """The private key in the PEM file ``path``. Raises `ConfigError` for what is no such key, the errors of reading a
    file, and `UnsupportedError` where the package cryptography is missing."""
    raw = _read(path)
    with extra("sign", "a signature"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    try:
        key = load_pem_private_key(raw, None)
        if not isinstance(key, Ed25519PrivateKey):
            raise TypeError
        return key
    except Exception:  # a bad key has many, and some are no ValueError
        raise ConfigError(
            f"{path} is no Ed25519 private key without a password, in PEM",
            hint=f"openssl genpkey -algorithm ed25519 -out {path} makes one",
        ) from None


def trusted_keys(config: Config) -> Sequence[Ed25519PublicKey]:
    """The keys one of which must have signed an image or an environment; none when any may be used. Raises
    `ConfigError` when a signature is required and there is no key to verify it with, and as `signing_key` does."""
    if not config.verify_key:
        if config.require_signature:
            raise ConfigError(
                "images and environments must be signed, and there is no key to verify that with",
                hint="set verify_key in the settings, or give --verify-key FILE",
            )
        return ()
    found = _PUBLIC.findall(_read(Path(config.verify_key)))
    with extra("sign", "a signature"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    try:
        keys = [key for pem in found if isinstance(key := load_pem_public_key(pem), Ed25519PublicKey)]
        if not found or len(keys) < len(found):
            raise TypeError
        return keys
    except Exception:
        raise ConfigError(
            f"{config.verify_key} has something else in it than Ed25519 public keys in PEM",
            hint="openssl pkey -in PRIVATE -pubout makes one of the private key",
        ) from None


def sign(key: Ed25519PrivateKey, content: bytes) -> bytes:
    """The signature of ``content``, in base64."""
    return base64.b64encode(key.sign(content))


def verify(
    keys: Sequence[Ed25519PublicKey],
    content: bytes,
    signature: bytes,
    what: str,
    *,
    hint: str = "have it converted with the key (image convert --sign-key), and look who changed it",
) -> None:
    """Return when one of ``keys`` made the ``signature`` (in base64; empty: there is none) of ``content``, which the
    error calls ``what``. Raises `UnsignedError`."""
    from cryptography.exceptions import InvalidSignature

    if not signature:
        raise UnsignedError(f"{what} is not signed", hint=hint)
    for key in keys:
        try:
            key.verify(base64.b64decode(signature, validate=True), content)
        except (InvalidSignature, ValueError):
            continue
        return
    raise UnsignedError(f"{what} is not signed by a key that is trusted here, or was changed", hint=hint)


def _read(path: Path) -> bytes:
    with doing(f"read the key {path}"):
        return document(path)
