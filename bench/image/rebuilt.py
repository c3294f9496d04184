"""The next builds of the bench's image: one package upgraded in the layer that has it, all other files as before; or
all layers made anew on another base, whose Python is the next minor version."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from bootseer.demo.programs import run
from bootseer.errors import BootseerError

PACKAGE, BEFORE, AFTER = "numpy", "numpy-", "numpy-9."
"""Its folder, and how the name of its ``dist-info`` begins in either build."""
_PYTHON = re.compile(r"((?:^|/)lib/python3\.)([0-9]+)(?=/|$)")
_LIMIT = 600


def build(old: str, new: str, work: Path, *, rebased: bool = False) -> None:
    """Push the next build of the image ``old`` as ``new``; both in registries without TLS. ``rebased``: on another
    base, else with one package upgraded."""
    layout = work / "layout"
    try:
        run(["skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{old}", f"oci:{layout}:1"])
        index = json.loads((layout / "index.json").read_text())
        manifest = json.loads(_blob(layout, index["manifests"][0]).read_bytes())
        config = json.loads(_blob(layout, manifest["config"]).read_bytes())
        changed = 0
        for number, layer in enumerate(manifest["layers"]):
            if diff := _changed(layout, layer, rebased):
                config["rootfs"]["diff_ids"][number] = diff
                changed += 1
        if not changed:
            raise BootseerError(f"no layer of {old} has {PACKAGE}")
        _put(layout, manifest["config"], json.dumps(config).encode())
        _put(layout, index["manifests"][0], json.dumps(manifest).encode())
        (layout / "index.json").write_text(json.dumps(index))
        run(["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}:1", f"docker://{new}"])
    finally:
        shutil.rmtree(layout, ignore_errors=True)


def _blob(layout: Path, item: dict[str, Any]) -> Path:
    return layout / "blobs" / Path(*str(item["digest"]).split(":"))


def _put(layout: Path, item: dict[str, Any], raw: bytes) -> None:
    item["digest"], item["size"] = f"sha256:{hashlib.sha256(raw).hexdigest()}", len(raw)
    _blob(layout, item).write_bytes(raw)


def _changed(layout: Path, layer: dict[str, Any], rebased: bool) -> str:
    """Replace ``layer`` when something in it changes; the digest of its tar then, else nothing."""
    with tarfile.open(_blob(layout, layer), "r:*") as given:
        if not rebased and not any(_of_package(member.name) for member in given):
            return ""
    moved = set[str]()
    out, digest = layout / "layer", hashlib.sha256()
    with (
        tarfile.open(_blob(layout, layer), "r:*") as given,
        open(out, "w+b") as file,
        subprocess.Popen(["pigz", "-1"], stdin=subprocess.PIPE, stdout=file) as pigz,
    ):
        assert pigz.stdin is not None
        with tarfile.open(fileobj=_Both(pigz.stdin, digest), mode="w|", format=tarfile.PAX_FORMAT) as made:
            for member in given:
                if rebased:
                    rebase(given, member, made, moved)
                else:
                    upgrade(given, member, made)
        pigz.stdin.close()
        if pigz.wait(_LIMIT):
            raise BootseerError("pigz failed")
    layer["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip"
    with open(out, "rb") as packed:
        layer["digest"], layer["size"] = (
            f"sha256:{hashlib.file_digest(packed, 'sha256').hexdigest()}",
            out.stat().st_size,
        )
    out.rename(_blob(layout, layer))
    return f"sha256:{digest.hexdigest()}"


class _Both(io.RawIOBase):
    """A pipe whose bytes are hashed on their way."""

    def __init__(self, pipe: Any, digest: Any) -> None:
        self._pipe, self._digest = pipe, digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._pipe.write(data)
        return len(data)


def _of_package(name: str) -> bool:
    return f"/{PACKAGE}/" in name


def upgrade(given: tarfile.TarFile, member: tarfile.TarInfo, made: tarfile.TarFile) -> None:
    """Copy ``member``: that of the package's own libraries with other bytes, of its ``dist-info`` with another name.

    Bytes behind the end of a library change none of what it does.
    """
    head, sign, rest = member.name.rpartition(f"/{BEFORE}")
    if sign and ".dist-info" in rest:
        member.name = f"{head}/{AFTER}{rest}"
        member.pax_headers = {}
    _copy(given, member, made, _of_package(member.name) and member.name.endswith(".so"))


def rebase(given: tarfile.TarFile, member: tarfile.TarInfo, made: tarfile.TarFile, moved: set[str]) -> None:
    """Copy ``member``: what lies in ``lib/python3.N`` to the folder of the next minor version, to which a link leads
    from there, as the interpreter is the same; programs and libraries with other bytes. ``moved``: the links so far."""
    name, link = _PYTHON.sub(_next, member.name), _PYTHON.sub(_next, member.linkname) if member.islnk() else ""
    if name != member.name:
        match = _PYTHON.search(member.name)
        assert match is not None
        if (old := member.name[: match.end(2)]) not in moved:
            moved.add(old)
            leads = tarfile.TarInfo(old)
            leads.type, leads.linkname = tarfile.SYMTYPE, _next(match).rpartition("/")[2]
            made.addfile(leads)
        member.name, member.pax_headers = name, {}
    if link:
        member.linkname = link
    _copy(given, member, made, True)


def _next(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1}"


def _copy(given: tarfile.TarFile, member: tarfile.TarInfo, made: tarfile.TarFile, changed: bool) -> None:
    """``changed``: with other bytes, if it is a program or library."""
    content = given.extractfile(member) if member.isreg() else None
    if changed and content is not None and content.read(4) == b"\x7fELF":
        content.seek(0)
        raw = content.read() + b"upgraded"
        member.size = len(raw)
        content = io.BytesIO(raw)
    elif content is not None:
        content.seek(0)
    made.addfile(member, content)
