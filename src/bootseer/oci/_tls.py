"""TLS settings per registry: the machine's certificates and those of docker and podman in ``certs.d``."""

from __future__ import annotations

import ssl
from pathlib import Path

from bootseer.errors import ConfigError

CERTS = (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d"))


def context_for(host: str, port: int) -> ssl.SSLContext:
    """Reads all CAs of the machine: once per host. `ConfigError` for a certificate that is not understood."""
    names = (f"{host}:{port}", *((host,) if port == 443 else ()))
    context = ssl.create_default_context()
    for folder in (base / name for base in CERTS for name in names):
        path = folder
        try:
            for path in sorted(folder.glob("*.crt")):
                context.load_verify_locations(path)
            for path in sorted(folder.glob("*.cert")):
                context.load_cert_chain(path, path.with_suffix(".key"))
        except OSError as exc:  # ssl.SSLError is one
            why = "it is no certificate in PEM" if isinstance(exc, ssl.SSLError) else exc.strerror or "cannot be read"
            raise ConfigError(
                f"certificate {path} for registry {names[0]}: {why}", hint="replace it, or take it away"
            ) from None
    return context
