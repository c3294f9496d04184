"""Package caches: what pip and uv keep of what they fetched and built, and what of it others may get.

That is packages, and what says which is which. Left out are pages of an index (they are asked for anew each time),
locks, what is of one node, and whatever a login may be in: of pip's answers go only the headers that pip needs, and no
entry of uv goes of which a file holds what may be a login."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import posixpath
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer.kernel import beneath
from bootseer.patterns import pattern
from bootseer.wiretypes import json_as, known

_ANSWER = pattern(r"http(-v2)?(?:/[0-9a-f]){5}/[0-9a-f]{56}")
_BUILT = pattern(r"wheels/((?:[0-9a-f]{2}/){3}[0-9a-f]{50})/[^/]+\.whl")
_RESPONSE = ("headers", "status", "version", "reason", "strict", "decode_content")
_HEADERS = {
    *("age", "cache-control", "content-encoding", "content-length", "content-type"),
    *("date", "etag", "expires", "last-modified"),
}
"""Of an answer that is used again. Others hold cookies, or the login that it was given for."""
_PACKAGES = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"Metadata-Version:")
"""How packages begin, and what an index tells of one; nothing else that pip fetches does."""
_HEAD = 32
_INTERPRETERS = [(short, f"3{minor}") for short in ("cp", "pp") for minor in range(6, 30)]
_ARCHIVE = pattern(r"archive-v\d+/([\w-]+)/")
_ENTRY = pattern(r"(?:wheels|sdists)-v\d+/(?:pypi|index|url|git)/(?!.*/src/).+")
_POINTERS = (".http", ".rev", ".msgpack")
_LOGIN = pattern(
    rb"(?i)(?:authorization|cookie)[ -~]|\b(?:basic|bearer) |[a-z]://[^\s\"'/@\0]*+@"
    rb"|(?:^|[\s\"'\0])(?>[^\s\"'\0]*?[a-z]://)[^\s\"'?\0]*+\?"
)
"""A login, or a URL that may have one; each word is looked through once. (On which headers an answer depends a pointer
says, without their values.)"""
_MOST = 16 << 20
_STRANGE = (OSError, ValueError, KeyError, RecursionError)
"""What comes of a file that is no entry: the command wrote what it liked."""


class Kept(NamedTuple):
    """A file of a cache that others may get; with ``data`` in place of what it holds, if there is any."""

    path: str
    data: Sequence[bytes | memoryview] = ()


class _Answer(msgspec.Struct):
    response: dict[str, msgspec.Raw]


class _Archive(msgspec.Struct, frozen=True):
    hash: str = ""


class _Origin(msgspec.Struct, frozen=True):
    url: str
    vcs_info: dict[str, str] = {}
    archive_info: _Archive = _Archive()


def public(folder: Path, files: Iterable[str], anew: Path) -> set[str]:
    """Those of the ``files`` below ``folder``, which has the caches by their names, that others may get; in the new
    folder ``anew`` are those that they get in another form. Raises `OSError`."""
    out = set[str]()
    with beneath.folder(folder) as root:
        for name, way in (("pip", of_pip), ("uv", of_uv)):
            here = {path.removeprefix(f"{name}/") for path in files if path.startswith(f"{name}/")}
            with contextlib.ExitStack() as stack:
                inside = stack.enter_context(beneath.folder(name, root=root)) if here else -1
                for path, data in way(inside, here):
                    out.add(f"{name}/{path}")
                    if data:
                        (anew / name / path).parent.mkdir(parents=True, exist_ok=True)
                        with (anew / name / path).open("xb") as file:
                            file.writelines(data)
    return out


def of_pip(root: int, found: Collection[str]) -> Iterator[Kept]:
    """Those of the regular files ``found``, by their paths below the folder descriptor ``root``."""
    for path in sorted(found):
        if match := _ANSWER.fullmatch(path):
            body = f"{path}.body" if match[1] else ""
            with contextlib.suppress(*_STRANGE):
                if data := _answer(root, path, body):
                    yield Kept(path, data)
                    yield from [Kept(body)] if body else []
        elif match := _BUILT.fullmatch(path):
            origin = f"{posixpath.dirname(path)}/origin.json"
            with contextlib.suppress(*_STRANGE):
                if _is_of(beneath.read_regular(origin, _MOST, root=root), match[1].replace("/", "")):
                    yield from (Kept(path), Kept(origin))


def _answer(root: int, path: str, body: str) -> list[bytes | memoryview]:
    """What is kept of an answer to pip; nothing unless it is a package's. The file ``body`` has its body, if named."""
    with open(beneath.open_regular(path, root=root), "rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    version = bytes(data[:5])
    said = msgspec.msgpack.decode(data[5:], type=known(_Answer)).response
    held: memoryview = msgspec.msgpack.decode(said["body"], type=known(memoryview))
    begin = _head(root, body) if body else bytes(held[:_HEAD])
    if version != b"cc=4," or msgspec.msgpack.decode(said["status"]) != 200 or not begin.startswith(_PACKAGES):
        return []
    headers = msgspec.msgpack.decode(said["headers"], type=known(dict[str, str]))
    kept = {name: value for name, value in headers.items() if name.lower() in _HEADERS}
    said["headers"] = msgspec.Raw(msgspec.msgpack.encode(kept))
    response = {"body": b"", **{name: said[name] for name in _RESPONSE if name in said}}
    before, _, behind = msgspec.msgpack.encode({"response": response, "vary": {}}).partition(b"\xc4\0")
    return [b"cc=4," + before, memoryview(said["body"]), behind]


def _head(root: int, path: str) -> bytes:
    with open(beneath.open_regular(path, root=root), "rb") as file:
        return file.read(_HEAD)


def _is_of(origin: bytes, name: str) -> bool:
    """Whether the folder ``name`` of a wheel that pip built is a digest of what its ``origin`` says, in which there is
    no login. Else it may be one of a password, which can be guessed by it."""
    said = json_as(origin, _Origin)
    url, digest = said.url, said.archive_info.hash.removeprefix("sha256=")
    if control := said.vcs_info:
        url = f"{control['vcs']}+{url}@{control['requested_revision']}"
    keys = (
        {"url": url, **checked, "interpreter_name": short, "interpreter_version": version}
        for checked in ({"sha256": digest}, {})
        for short, version in _INTERPRETERS
    )
    texts = (json.dumps(key, sort_keys=True, separators=(",", ":")) for key in keys)
    return not _LOGIN.search(origin) and any(hashlib.sha224(text.encode()).hexdigest() == name for text in texts)


def of_uv(root: int, found: Collection[str]) -> Iterator[Kept]:
    """Those of the regular files ``found``, by their paths below the folder descriptor ``root``. uv needs none of its
    links: a pointer names its archive, and wheels that it built are unpacked again."""
    pointers, private = dict[str, bytes](), set[str]()
    for path in sorted(found):
        if _ENTRY.fullmatch(path) and path.endswith(_POINTERS):
            with contextlib.suppress(OSError):
                pointers[path] = beneath.read_regular(path, _MOST, root=root)
                if _LOGIN.search(pointers[path]):
                    private.add(f"{posixpath.dirname(path)}/")
    public = [path for path in pointers if not path.startswith(tuple(private))]
    named = b"\0".join(pointers[path] for path in public)
    yield from map(Kept, public)
    for path in sorted(found):
        archive = _ARCHIVE.match(path)
        built = _ENTRY.fullmatch(path) and path.endswith(".whl") and not path.startswith(tuple(private))
        if built or (archive and os.fsencode(archive[1]) in named):
            yield Kept(path)
