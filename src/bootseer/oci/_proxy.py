"""HTTP proxies as the environment names them: ``HTTP_PROXY``, ``HTTPS_PROXY``, ``NO_PROXY`` in either case."""

from __future__ import annotations

import base64
import urllib.request
from urllib.parse import unquote, urlsplit


def proxy_for(scheme: str, host: str) -> str | None:
    """The URL of the proxy for ``scheme://host``, or None."""
    found = urllib.request.getproxies_environment().get(scheme)
    if not found or urllib.request.proxy_bypass_environment(host):  # type: ignore[attr-defined]
        return None
    return found if "://" in found else f"http://{found}"


def login_header(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if not parts.username:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
