"""Credentials: keep them out of keys and documents, and find them in captured files.

Removal is for text that is published as part of a key document. The scan reads captured files before publication; what
a wheel brought itself (listed in a RECORD with the same hash) is public already and does not count, because packages
ship example URLs and test keys that would otherwise stop every publication.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

REMOVED = "<credential>"
SCAN_LIMIT = 1 << 20
"""Larger files are not scanned: secrets sit in small text files."""

_URL = re.compile(
    r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]{1,15}://)(?P<user>[^\s/@:\"'<>]*)(?::(?P<word>[^\s/@\"'<>]*))?@"
)
_NAMED = re.compile(r"(?i)(token|secret|passw(or)?d|passphrase|credential|api_?key|access_?key|private_?key)")
_OPTION = re.compile(r"(?i)^--?[a-z-]*(token|secret|password|passphrase|api-?key|access-?key)$")
_OPTION_VALUE = re.compile(r"(?i)^(--?[a-z-]*(?:token|secret|password|passphrase|api-?key|access-?key)=).+$", re.S)

_PEM = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ ){0,2}PRIVATE KEY-----\s+(?:[A-Za-z-]+: [^\n]*\n|\s)*[A-Za-z0-9+/=]{48}")
_URL_BYTES = re.compile(rb"\b[a-zA-Z][a-zA-Z0-9+.-]{1,15}://([^\s/@:\"'<>]{1,128}):([^\s/@\"'<>]{1,256})@[A-Za-z0-9\[]")
_URL_TOKEN = re.compile(rb"://([A-Za-z0-9_.~%=+-]{20,256})@[A-Za-z0-9\[]")
_TOKEN = re.compile(
    rb"\b(?:gh[pousr]_|github_pat_|glpat-|hf_)([A-Za-z0-9](?:_?[A-Za-z0-9]|-[A-Za-z0-9]){19,255})(?![\w(.])"
)
_AWS = re.compile(rb"(?i)aws_secret_access_key[\"']?\s*[=:]\s*[\"']?([A-Za-z0-9/+=]{16,128})(?![\w(.])")
_NPM = re.compile(rb"(?m)^\s*\S*_(?:authToken|auth|password)\s*=\s*(?!\$\{)\S+")
_NETRC = re.compile(rb"(?m)^\s*(?:machine\s+\S+|default)\b(?s:.){0,200}?\bpassword\s+\S+")
_INI_PASSWORD = re.compile(rb"(?mi)^\s*password\s*[=:]\s*\S+")
_AUTH = re.compile(rb'"(?:auth|identitytoken)"\s*:\s*"[^"]+"')
_BY_NAME: dict[str, tuple[re.Pattern[bytes], str]] = {
    ".netrc": (_NETRC, "netrc password"),
    "_netrc": (_NETRC, "netrc password"),
    ".pypirc": (_INI_PASSWORD, "package index password"),
    ".git-credentials": (_URL_BYTES, "git credentials"),
    ".dockerconfigjson": (_AUTH, "registry credentials"),
    ".npmrc": (_NPM, "package registry token"),
    "config.json": (_AUTH, "registry credentials"),
}
_PLACEHOLDER = re.compile(
    rb"(?i)^(?:p|pw|pass|passw(?:or)?d|pwd|user|token|secret|x+|\*+|\.\.\.|redacted|changeme"
    rb"|(?:[#$]?\{[^{}]*\}|\$\w+|\$\([^()]*\)|%\(\w+\)[a-z]|%[a-z]|%\w+%|<[^<>]*>|\[[^\[\]]*\][+*?]?|\([^()]*\)[+*?]?|\\.*)+)$"
)
_PREFIXES = (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_", b"glpat-", b"hf_")
_GENERATED = {"direct_url.json", "uv_cache.json", "REQUESTED", "INSTALLER"}


def remove_credentials(text: str) -> str:
    """``text`` with user names and passwords of URLs replaced by `REMOVED`."""
    return _URL.sub(lambda found: f"{found['scheme']}{REMOVED}@", text)


def remove_from_command(command: Iterable[str]) -> list[str]:
    """The command with URL credentials and the values of options such as ``--token`` replaced."""
    out: list[str] = []
    hide = False
    for word in command:
        if hide and not word.startswith("-"):
            word = REMOVED
        hide = bool(_OPTION.match(word))
        out.append(_OPTION_VALUE.sub(rf"\g<1>{REMOVED}", remove_credentials(word)))
    return out


def remove_from_variable(name: str, value: str) -> str:
    """The value of a variable for a key document: nothing of it when its name says that it is a secret."""
    return REMOVED if value and _NAMED.search(name) else remove_credentials(value)


def _suspicion(name: str, data: bytes) -> str:
    if b"\0" in data[:8192]:
        return ""
    if named := _BY_NAME.get(name):
        pattern, what = named
        if pattern.search(data):
            return what
    if b"PRIVATE KEY-----" in data and _PEM.search(data):
        return "private key"
    if b"://" in data and b"@" in data:
        for found in _URL_BYTES.finditer(data):
            user, word = found.groups()
            if not _PLACEHOLDER.match(word) and user.lower() != word.lower():
                return "password in a URL"
        if any(_is_random(found[1]) for found in _URL_TOKEN.finditer(data)):
            return "token in a URL"
    if any(prefix in data for prefix in _PREFIXES) and any(_is_random(found[1]) for found in _TOKEN.finditer(data)):
        return "access token"
    secret = b"secret_access_key" in data or b"SECRET_ACCESS_KEY" in data
    if secret and any(_is_random(found[1]) and b"EXAMPLE" not in found[1] for found in _AWS.finditer(data)):
        return "cloud access key"
    return ""


def _is_random(word: bytes) -> bool:
    """Tells a generated token from a name or a row of placeholders in an example."""
    text = word.decode("ascii", "replace")
    kinds = (any(map(str.isdigit, text)), any(map(str.isupper, text)), any(map(str.islower, text)))
    return sum(kinds) >= 2 and len(set(word)) >= 8


class SecretScan:
    """Scans files handed to `look` one by one; `findings` then yields (path, what) of those that matter."""

    def __init__(self) -> None:
        self._suspects: dict[str, tuple[str, str]] = {}
        self._records: list[tuple[str, bytes]] = []

    def look(self, path: str, data: bytes) -> None:
        """``path`` is relative to the root of its tree, ``data`` its whole content (at most `SCAN_LIMIT`)."""
        folder, name = os.path.split(path)
        if name == "RECORD" and folder.endswith(".dist-info"):
            self._records.append((os.path.dirname(folder), data))
        elif what := _suspicion(name, data):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            self._suspects[path] = (what, digest)

    def findings(self) -> Iterator[tuple[str, str]]:
        """Suspects that no installed wheel lists with the same content, in path order."""
        known: dict[str, str] = {}
        if self._suspects:
            for base, data in self._records:
                known.update(_record(base, data))
        for path, (what, digest) in sorted(self._suspects.items()):
            if Path(path).name in _GENERATED or known.get(path) != digest:
                yield path, what


def _record(base: str, data: bytes) -> Iterator[tuple[str, str]]:
    for row in csv.reader(data.decode("utf-8", "replace").splitlines()):
        if len(row) >= 2 and row[1].startswith("sha256="):
            yield os.path.normpath(os.path.join(base, row[0])), row[1].removeprefix("sha256=").rstrip("=")
