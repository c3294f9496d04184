"""Keys to sign with."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def pair(folder: Path, name: str = "key") -> dict[str, str]:
    """The settings ``sign_key`` and ``verify_key`` of a new key, whose files are in ``folder``."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    made = {"sign_key": folder / f"{name}.private", "verify_key": folder / f"{name}.public"}
    for path, data in zip(made.values(), (private, public), strict=True):
        path.write_bytes(data)
    return {setting: str(path) for setting, path in made.items()}
