"""Credentials: keep them out of keys and documents, and find them in captured files.

Key documents hold digests of scripts, files and values, and texts only after `redact`. The scan reads captured files
before publication; what a wheel from an index brought itself (listed in a RECORD with the same hash) is public already
and does not count, because packages ship example URLs and test keys that would otherwise stop every publication."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from bootseer.patterns import pattern

REMOVED = "<credential>"
HIDDEN = "<hidden>"
WINDOW = 1 << 20
"""Bytes of a file that are scanned at once."""
_OVERLAP = 4096
"""Bytes that windows share: longer than any pattern."""
_ROUNDS = 50_000

_TOOLS = {"CC", "CXX", "CUDA", "CUDA_HOME", "CUDA_VERSION", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS"}
HARMLESS = _TOOLS | {"LANG", "LC_ALL", "PYTHONHASHSEED", "PYTHON_VERSION", "TZ"}
"""Variables whose values a key document shows."""

_SECRET_NAME = r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|secret|private|account)[_-]?key)"
_SECRET_WORDS = (b"token", b"secret", b"passw", b"passphrase", b"credential", b"key")
"""One of them is in each `_SECRET_NAME`."""
_URL = pattern(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]{1,15}://)(?P<user>[^\s/@:\"'<>]*)(?::(?P<word>[^\s/@\"'<>]*))?@")
_NAMED = pattern(rf"(?i){_SECRET_NAME}(?:$|_)|_(?:pat|pass|pwd|webhook)$|^sshpass$")
_OPTION = pattern(rf"(?i)^--?[a-z-]*{_SECRET_NAME}$")
_OPTION_VALUE = pattern(rf"(?is)^(--?[a-z-]*{_SECRET_NAME}=).+$")
_VALUE = r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s;&|]+)"
_SHOWN_SECRETS = (
    pattern(rf"(?i)((?:\b|_|--?)[\w.-]{{0,60}}{_SECRET_NAME}[\"']?(?:[ \t]*+[=:][ \t]*|[ \t]++)){_VALUE}"),
    pattern(rf"(?i)((?:\b|_)(?:pass|pwd|auth)[\"']?[ \t]*[=:][ \t]*){_VALUE}"),
    pattern(rf"(\bsshpass\s+-p[ ]?|\bmysql\w*\s[^\n;&|]{{0,1000}}?\s-p){_VALUE}"),
    pattern(r"(?i)(\b(?:authorization\s*:|bearer|basic)\s+)([^\"'\n]+)"),
    pattern(r"(?m)((?:^|\s)(?:-u|--user|--proxy-user)[ =]?)(\S+:\S+)"),
)
"""What is hidden in texts, though the digest covers it: the name of a secret, then its value."""
_PATH = r"(?:/root|/tmp|(?:/[\w.+-]+){2,})/?"
_GUESSED = pattern(rf"{_PATH}(?::{_PATH})*|(?i:[01]|true|false|yes|no|on|off)")
"""Values of variables that may be guessed: switches, and paths. One word behind a slash may be a password."""
_LONG_WORD = pattern(r"[A-Za-z0-9_+=-]{20,}")
_HEX = pattern(r"(?i)[0-9a-f]{32,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_BODY = r"[A-Za-z0-9](?:_?[A-Za-z0-9]|-[A-Za-z0-9]){19,255}"
_TOKENS = (  # (what every match contains, the published shape)
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"), rf"(?:gh[pousr]_|github_pat_){_BODY}"),
    (("glpat-", "gldt-", "glrt-"), rf"gl(?:pat|dt|rt)-{_BODY}"),
    (("hf_", "api_org_"), rf"(?:hf_|api_org_){_BODY}"),
    (("AKIA", "ASIA"), r"(?:AKIA|ASIA)[A-Z2-7]{16}"),
    (("AIza",), r"AIza[\w-]{35}"),
    (("ya29.",), r"ya29\.[\w-]{20,}"),
    (("GOCSPX-",), r"GOCSPX-[\w-]{28}"),
    (("AccountKey=",), r"AccountKey=[A-Za-z0-9+/]{86}=="),
    (("LTAI",), r"LTAI[A-Za-z0-9]{16,20}"),
    (("npm_",), r"npm_[A-Za-z0-9]{36}"),
    (("pypi-AgE",), r"pypi-AgE[\w-]{50,}"),
    (("dckr_pat_",), r"dckr_pat_[\w-]{20,}"),
    (
        ("sk-ant-", "sk-proj-", "sk-svcacct-", "T3BlbkFJ"),
        r"sk-(?:(?:ant|proj|svcacct)-[\w-]{20,}|\w{20}T3BlbkFJ\w{20})",
    ),
    (("nvapi-",), r"nvapi-[\w-]{40,}"),
    (("wandb_v1_",), r"wandb_v1_\w{40,}"),
    (("dapi",), r"dapi[0-9a-f]{32}"),
    (("xoxb-", "xoxp-", "xoxa-", "xoxr-", "xoxs-"), r"xox[abprs]-[\w-]{20,}"),
    (("hvs.",), r"hvs\.[\w-]{24,}"),
    (("sk_live_", "rk_live_"), r"[sr]k_live_[A-Za-z0-9]{20,}"),
    (("dop_v1_",), r"dop_v1_[0-9a-f]{64}"),
    (("eyJ",), r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
)
_EDGES = r"(?<![A-Za-z0-9]){}(?![\w(.])"
_TOKEN_BYTES = [
    (mark.encode(), pattern(_EDGES.format(f"({shape})").encode())) for marks, shape in _TOKENS for mark in marks
]
_TOKEN_TEXT = pattern(_EDGES.format("(?:" + "|".join(shape for _, shape in _TOKENS) + ")"))
_PEM_TEXT = pattern(r"(?s)-----BEGIN (?:[A-Z0-9]+ ){0,2}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*KEY-----|$)")

_PEM = pattern(
    rb"-----BEGIN (?:[A-Z0-9]+ ){0,2}PRIVATE KEY-----(?:\\[nr]|\s)+(?:[A-Za-z-]+: [^\n]*\n|\s)*[A-Za-z0-9+/=]{48}"
)
_URL_BYTES = pattern(rb"\b[a-zA-Z][a-zA-Z0-9+.-]{1,15}://([^\s/@:\"'<>]{1,128}):([^\s/@\"'<>]{1,256})@[A-Za-z0-9\[]")
_URL_TOKEN = pattern(rb"://([A-Za-z0-9_.~%=+-]{20,256})@[A-Za-z0-9\[]")
_AWS = pattern(rb"(?i)aws_secret_access_key[\"']?\s*[=:]\s*[\"']?([A-Za-z0-9/+=]{16,128})(?![\w(.])")
_KUBE = pattern(rb"client-key-data:\s*[A-Za-z0-9+/=]{64}")
_NPM = pattern(rb"(?m)^\s*\S*_(?:authToken|auth|password)\s*=\s*(?!\$\{)\S+")
_SETTINGS = pattern(
    r"(?:^|/)(?:\.?npmrc|\.yarnrc(?:\.yml)?|pip\.conf|uv\.toml|\.(?:cond|mamb)arc|\.?curlrc|\.wgetrc|\.gemrc"
    r"|\.bundle/config|pnpm/(?:rc|auth\.ini)|(?:\.cargo|pypoetry|pdm)/config\.toml)$"
)
"""Of installers: in them logins may stand beside what decides."""
_LOGINS = pattern(r"(?:^|/)(?:pypoetry/auth\.toml|\.cargo/credentials(?:\.toml)?|\.(?:gem|aws)/credentials)$")
_LOGIN = pattern(
    rb"(?mi)^[ \t]*-{0,2}[\"':]?(?:\S*[:/])?(?:_?(?:npm)?auth(?:Token|Ident)?"
    rb"|_?(?:(?:http|ftp|proxy)[-_])?(?:password|user(?:name)?)|email|token|rubygems_api_key|u(?=[ \t=]+\S+:)"
    rb"|header(?=[ \t=:\"]+(?:proxy-)?authorization)|lastUpdateCheck"
    rb"|BUNDLE_(?!BUILD__|MIRROR__|LOCAL__|PATH__|GITHUB__|PLUGINS)\w+__\w+)[\"']?(?:[ \t]*[=:]|[ \t])[^\n]*\n?"
)
"""A line of them, but in pip.conf, where ``user`` says where to install."""
_NO_SETTING = pattern(rb"\s*(?:[#;].*|---)?\s*")
_HEADING = pattern(rb"(\s*)(?:(\[.*\])|:?[^\s:]+:)\s*")
_NETRC = pattern(rb"(?m)^\s*(?:machine\s+\S+|default)\b(?s:.){0,200}?\bpassword\s+\S+")
_INI_PASSWORD = pattern(rb"(?mi)^\s*(?:password|secret_key|gs_oauth2_refresh_token)\s*[=:]\s*\S+")
_PGPASS = pattern(rb"(?m)^[^#\s:]+:[^:\n]*:[^:\n]*:[^:\n]*:\S+")
_AUTH = pattern(rb'"(?:auth|identitytoken)"\s*:\s*"[^"]+"')
_REFRESH = pattern(rb'"refresh_token"\s*:\s*"[^"]+"')
_BY_NAME: dict[str, tuple[re.Pattern[bytes], str]] = {
    ".netrc": (_NETRC, "netrc password"),
    "_netrc": (_NETRC, "netrc password"),
    ".pypirc": (_INI_PASSWORD, "package index password"),
    ".my.cnf": (_INI_PASSWORD, "database password"),
    ".pgpass": (_PGPASS, "database password"),
    ".s3cfg": (_INI_PASSWORD, "cloud access key"),
    ".boto": (_INI_PASSWORD, "cloud access key"),
    "application_default_credentials.json": (_REFRESH, "cloud credentials"),
    ".git-credentials": (_URL_BYTES, "git credentials"),
    ".dockerconfigjson": (_AUTH, "registry credentials"),
    ".npmrc": (_NPM, "package registry token"),
    "config.json": (_AUTH, "registry credentials"),
}
_DOTENV = pattern(rb"(?mi)^\s*(?:export\s+)?\w*" + _SECRET_NAME.encode() + rb"\s*=\s*[\"']?([^\s\"'#]+)")
_ASSIGNED = pattern(
    rb"(?mi)^[ \t]*(?:export[ \t]+)?[\"']?[\w.-]{0,60}" + _SECRET_NAME.encode() + rb"[\"']?[ \t]*[=:][ \t]*([^\s#])"
)
_CODE = (".py", ".pyi", ".pyx", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".rs", ".js", ".ts", ".go")
_SECRET_FILE = pattern(rf"(?i)(?:^|[_.-]){_SECRET_NAME}s?(?:\.[a-z]{{1,5}})?$")
_PLACEHOLDER = pattern(
    rb"(?i)^(?:p|pw|pass|passw(?:or)?d|pwd|user|token|secret|x+|\*+|\.\.\.|redacted|changeme|your[-_]\S*"
    rb"|(?:[#$]?\{[^{}]*\}|\$\w+|\$\([^()]*\)|%\(\w+\)[a-z]|%[a-z]|%\w+%|<[^<>]*>|\[[^\[\]]*\][+*?]?|\([^()]*\)[+*?]?|\\.*)+)$"
)
_GENERATED = {"direct_url.json", "uv_cache.json", "REQUESTED", "INSTALLER"}


def remove_credentials(text: str) -> str:
    """``text`` with user names and passwords of URLs, tokens of known shapes and private keys replaced by `REMOVED`:
    what may change without another result of the command."""
    if "://" in text and "@" in text:
        text = _URL.sub(lambda found: f"{found['scheme']}{REMOVED}@", text)
    if "PRIVATE KEY-----" in text:
        text = _PEM_TEXT.sub(REMOVED, text)
    if not any(mark in text for marks, _ in _TOKENS for mark in marks):
        return text
    return _TOKEN_TEXT.sub(lambda found: REMOVED if _is_random(found[0].encode()) else found[0], text)


def redact(text: str) -> str:
    """``text`` for people: also what is assigned to names of secrets, and every long random word, is hidden."""
    text = remove_credentials(text)
    for shape in _SHOWN_SECRETS:
        text = shape.sub(lambda found: found[0] if found[2] in (REMOVED, HIDDEN) else f"{found[1]}{HIDDEN}", text)
    return _LONG_WORD.sub(lambda found: HIDDEN if _HEX.search(found[0]) or _is_mixed(found[0]) else found[0], text)


def slow_digest(data: bytes | str) -> str:
    """A digest (hex) of what may hold a secret: about 10 ms, so that a password is not guessed by it."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogateescape")
    return hashlib.pbkdf2_hmac("sha256", data, b"bootseer-env-key", _ROUNDS).hex()


def remove_from_command(command: Iterable[str]) -> list[str]:
    """The command without credentials and the values of options such as ``--token``; of a word in which more is hidden
    a digest stands behind it."""
    out: list[str] = []
    hide = False
    for word in command:
        if hide and not word.startswith("-"):
            word = REMOVED
        hide = bool(_OPTION.match(word))
        clean = _OPTION_VALUE.sub(rf"\g<1>{REMOVED}", remove_credentials(word))
        shown = redact(clean)
        out.append(clean if shown == clean else f"{shown} <digest {slow_digest(clean)[:32]}>")
    return out


@functools.lru_cache(1024)  # a digest takes 10 ms
def remove_from_variable(name: str, value: str) -> str:
    """The value of a variable for a key document: as it is when the variable is `HARMLESS`, nothing of it when its name
    says that it is a secret, else a digest without credentials of URLs."""
    if not value or name in HARMLESS:
        return remove_credentials(value)
    if _NAMED.search(name):
        return REMOVED
    text = f"{name}={remove_credentials(value)}".encode("utf-8", "surrogateescape")
    guessed = _GUESSED.fullmatch(value) and redact(value) == value
    digest = hashlib.sha256(text).hexdigest() if guessed else slow_digest(text)
    return f"<digest {digest[:32]}>"


def may_be_secret(name: str, value: str) -> bool:
    """Whether the ``value`` of the variable ``name`` is nothing to be shown."""
    return bool(_NAMED.search(name)) or redact(value) != value


def only_credentials(path: str) -> bool:
    """Whether the file ``path`` holds nothing but credentials."""
    name = os.path.basename(path)
    return (name in _BY_NAME and name not in ("config.json", ".npmrc")) or bool(_LOGINS.search(path))


def holds_credentials(path: str) -> bool:
    """Whether the file ``path`` is one of those of which no text is shown."""
    name = os.path.basename(path)
    return only_credentials(path) or name == ".npmrc" or _is_dotenv(name) or name.endswith((".pem", ".key"))


def without_logins(path: str, data: bytes) -> bytes:
    """Settings of an installer without its logins, comments, and headings of nothing; any other file as it is."""
    if not _SETTINGS.search(path):
        return data
    data = data if path.endswith("pip.conf") else _LOGIN.sub(b"", data)
    kept = list[bytes]()
    for line in reversed(data.splitlines()):
        below = kept[-1] if kept else b""
        if heading := _HEADING.fullmatch(line):
            deeper = below.startswith((heading[1] + b" ", heading[1] + b"\t", heading[1] + b"-"))
            is_empty = not below or (below.startswith(b"[") if heading[2] else not deeper)
        else:
            is_empty = _NO_SETTING.fullmatch(line) is not None
        kept += [] if is_empty else [line]
    text = b"\n".join(reversed(kept)).decode("utf-8", "surrogateescape")
    return remove_credentials(text).encode("utf-8", "surrogateescape")


def holds_password(name: str, data: bytes) -> bool:
    """Whether the file may hold a secret of no known shape, so that its digest is to be a slow one."""
    if holds_credentials(name) or _SECRET_FILE.search(name):
        return True
    assigned = (_ASSIGNED.match(data, start) for start in _suspicious_lines(data))
    return any(found and (found[1] in b"\"'" or not name.endswith(_CODE)) for found in assigned)


def _suspicious_lines(data: bytes) -> Iterator[int]:
    """Where the lines begin that may have a `_SECRET_NAME`. (`_ASSIGNED` at each place takes thirty times as long.)"""
    lower = data.lower()
    for word in _SECRET_WORDS:
        end = 0
        while (at := lower.find(word, end)) >= 0:
            yield data.rfind(b"\n", 0, at) + 1
            end = data.find(b"\n", at) % (len(data) + 1)  # at the end of the data, too


def _is_dotenv(name: str) -> bool:
    is_one = name.endswith(".env") or name.startswith(".env.")
    return is_one and not name.endswith((".example", ".sample", ".template", ".dist"))


def _suspicion(name: str, data: bytes) -> str:
    if named := _BY_NAME.get(name):
        shape, what = named
        if shape.search(data):
            return what
    if _is_dotenv(name) and any(not _PLACEHOLDER.match(found[1]) for found in _DOTENV.finditer(data)):
        return "secret variable"
    if b"PRIVATE KEY-----" in data and _PEM.search(data):
        return "private key"
    if b"://" in data and b"@" in data:
        for found in _URL_BYTES.finditer(data):
            user, word = found.groups()
            if not _PLACEHOLDER.match(word) and user.lower() != word.lower():
                return "password in a URL"
        if any(_is_random(found[1]) for found in _URL_TOKEN.finditer(data)):
            return "token in a URL"
    for mark, shape in _TOKEN_BYTES:
        if mark in data:
            for found in shape.finditer(data):
                if _is_random(found[1]) and b"EXAMPLE" not in found[1]:
                    return "access token"
    secret = b"secret_access_key" in data or b"SECRET_ACCESS_KEY" in data
    if secret and any(_is_random(found[1]) and b"EXAMPLE" not in found[1] for found in _AWS.finditer(data)):
        return "cloud access key"
    if b"client-key-data" in data and _KUBE.search(data):
        return "private key"
    return ""


def _is_mixed(word: str) -> bool:
    return all(any(map(kind, word)) for kind in (str.isdigit, str.isupper, str.islower)) and len(set(word)) >= 8


def _is_random(word: bytes) -> bool:
    """Tells a generated token from a name or a row of placeholders in an example."""
    text = word.decode("ascii", "replace")
    kinds = (any(map(str.isdigit, text)), any(map(str.isupper, text)), any(map(str.islower, text)))
    return sum(kinds) >= 2 and len(set(word)) >= 8


class SecretScan:
    """Scans files handed to `look` one by one; `findings` then yields (path, what) of those that matter."""

    def __init__(self) -> None:
        self._suspects: dict[str, tuple[str, str]] = {}
        self._records: dict[str, bytes] = {}
        self._private: set[str] = set()

    def look(self, path: str, windows: Iterable[bytes]) -> bool:
        """Whether it is a suspect. ``path`` is relative to the root of its tree, ``windows`` its content in pieces, all
        of which are taken. A file whose first 8 KiB hold a NUL is not scanned. What was seen by this name before is
        forgotten."""
        self.forget(path)
        folder, name = os.path.split(path)
        installed = folder.endswith(".dist-info")
        whole = hashlib.sha256()
        record, tail, what, binary = b"", b"", "", None
        for window in windows:
            if binary is None:
                binary = b"\0" in window[:8192]
            if binary:
                continue
            whole.update(window)
            if name == "RECORD" and installed:
                record += window
                continue
            data = tail + window
            what = what or _suspicion(name, data)
            if name == "direct_url.json" and installed and (b'"dir_info"' in data or b'"vcs_info"' in data):
                self._private.add(folder)
            tail = data[-_OVERLAP:]
        if record:
            self._records[folder] = record
        elif what:
            self._suspects[path] = (what, base64.urlsafe_b64encode(whole.digest()).rstrip(b"=").decode())
        return path in self._suspects

    def forget(self, path: str) -> None:
        """There is no such file any more."""
        folder, name = os.path.split(path)
        self._suspects.pop(path, None)
        if name == "RECORD":
            self._records.pop(folder, None)
        elif name == "direct_url.json":
            self._private.discard(folder)

    def findings(self) -> Iterator[tuple[str, str]]:
        """Suspects, in path order, that no wheel lists with the same content, unless it was built from a folder or a
        repository, which need not be public."""
        known: dict[str, str] = {}
        if self._suspects:
            for folder, data in self._records.items():
                if folder not in self._private:
                    known.update(_record(os.path.dirname(folder), data))
        for path, (what, digest) in sorted(self._suspects.items()):
            if Path(path).name in _GENERATED or known.get(path) != digest:
                yield path, what


def _record(base: str, data: bytes) -> Iterator[tuple[str, str]]:
    for row in csv.reader(data.decode("utf-8", "replace").splitlines()):
        if len(row) >= 2 and row[1].startswith("sha256="):
            yield os.path.normpath(os.path.join(base, row[0])), row[1].removeprefix("sha256=").rstrip("=")
