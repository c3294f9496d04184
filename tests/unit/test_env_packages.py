"""What is kept of the caches of pip and uv: packages, and nothing that a login may be in."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from bootseer.env import packages, scan
from bootseer.env.packages import Kept
from bootseer.kernel import beneath

NAME = "0123456789abcdef" * 3 + "01234567"
ANSWER = "/".join(["http-v2", *NAME[:5], NAME])
OLD = "/".join(["http", *NAME[:5], NAME])
PACKAGE = b"PK\x03\x04 a package"
Way = Callable[[int, Mapping[str, os.stat_result]], Iterator[Kept]]


def kept(way: Way, folder: Path) -> dict[str, bytes]:
    with beneath.folder(folder) as root:
        files = {path: status for path, status in scan.walk(folder) if not stat.S_ISDIR(status.st_mode)}
        found = list(way(root, files))
        assert len({one.path for one in found}) == len(found)
        return {one.path: b"".join(one.data) for one in found}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def answer(body: bytes = b"", headers: Mapping[str, str] | None = None, **changed: object) -> bytes:
    response = {"body": body, "headers": dict(headers or {}), "status": 200, "version": 11, "reason": "OK"}
    response |= {"strict": 0, "decode_content": False, **changed}
    return b"cc=4," + msgspec.msgpack.encode({"response": response, "vary": {"Authorization": "Basic bWU6aHVudGVy"}})


def opened(data: bytes) -> dict[str, object]:
    assert data.startswith(b"cc=4,")
    found: dict[str, object] = msgspec.msgpack.decode(data[5:])
    return found


@pytest.mark.parametrize("old", [False, True])
def test_an_answer_to_pip_keeps_its_package_and_no_cookie_and_no_login(tmp_path: Path, old: bool) -> None:
    headers = {"Set-Cookie": "session=hunter2", "ETag": '"x"', "cache-control": "max-age=9", "X-Key": "hunter2"}
    headers |= {"Location": "https://host/a.whl?token=hunter2", "Vary": "Authorization"}
    if old:
        write(tmp_path, {OLD: answer(PACKAGE, headers, note="hunter2")})
    else:
        write(tmp_path, {ANSWER: answer(b"", headers, note="hunter2"), f"{ANSWER}.body": PACKAGE})
    found = kept(packages.of_pip, tmp_path)
    assert found.keys() == ({OLD} if old else {ANSWER, f"{ANSWER}.body"})
    data = found[OLD if old else ANSWER]
    assert b"hunter" not in data
    assert b"bWU6aHVudGVy" not in data
    assert opened(data) == {
        "response": {
            "body": PACKAGE if old else b"",
            "headers": {"ETag": '"x"', "cache-control": "max-age=9"},
            "status": 200, "version": 11, "reason": "OK", "strict": 0, "decode_content": False,
        },
        "vary": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (answer(), b"<!DOCTYPE html><a href='https://me:hunter2@host/a.whl'>"),
        (answer(), b'{"meta": {"api-version": "1.0"}}'),
        (answer(status=302), PACKAGE),
        (answer(headers=None, status="200"), PACKAGE),
        (b"cc=4," + b"\x81" * 5000, PACKAGE),
        (b"cc=4," + msgspec.msgpack.encode({"response": {}}), PACKAGE),
        (b"cc=4," + msgspec.msgpack.encode({"response": {"body": b"", "headers": {"a": 1}, "status": 200}}), PACKAGE),
        (b"cc=2," + answer()[5:], PACKAGE),
        (b"", PACKAGE),
    ],
)
def test_what_is_no_package_or_no_answer_of_pip_is_left_out(tmp_path: Path, data: bytes, body: bytes) -> None:
    write(tmp_path, {ANSWER: data, f"{ANSWER}.body": body, "selfcheck/x": b"{}", "http-v2/a/x.tmp": PACKAGE})
    assert kept(packages.of_pip, tmp_path) == {}


def test_an_answer_that_leads_elsewhere_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"cache/x": b"", "secret": answer(PACKAGE)})
    place = tmp_path / "cache" / OLD
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "secret")
    assert kept(packages.of_pip, tmp_path / "cache") == {}
    write(tmp_path / "cache", {ANSWER: answer()})
    (tmp_path / "cache" / f"{ANSWER}.body").symlink_to(tmp_path / "secret")
    assert kept(packages.of_pip, tmp_path / "cache") == {}


def test_a_wheel_that_pip_built_is_kept_unless_its_name_is_a_digest_of_a_login(tmp_path: Path) -> None:
    def built(url: str, said: Mapping[str, object], **checked: str) -> str:
        key = {"url": url, **checked, "interpreter_name": "cp", "interpreter_version": "311"}
        text = json.dumps(key, sort_keys=True, separators=(",", ":"))
        name = hashlib.sha224(text.encode()).hexdigest()
        folder = "/".join(["wheels", name[:2], name[2:4], name[4:6], name[6:]])
        write(tmp_path, {f"{folder}/a-1-py3-none-any.whl": PACKAGE, f"{folder}/origin.json": json.dumps(said).encode()})
        return folder

    plain, commit = "https://host/a-1.tar.gz", "f" * 40
    good = [
        built(plain, {"url": plain, "archive_info": {"hash": "sha256=ab"}}, sha256="ab"),
        built(plain, {"url": plain, "archive_info": {"hash": "sha256=ab"}}),
        built(f"git+https://host/a@{commit}", {
            "url": "https://host/a", "vcs_info": {"vcs": "git", "commit_id": commit, "requested_revision": commit}
        }),
    ]  # fmt: skip
    built("https://me:hunter2@host/a-1.tar.gz", {"url": plain, "archive_info": {"hash": "sha256=ab"}})
    built(f"{plain}?token=x", {"url": f"{plain}?token=x", "archive_info": {}})
    built(plain + "1", {"url": 7})
    assert {os.path.dirname(path) for path in kept(packages.of_pip, tmp_path)} == set(good)


HASH = "wheels-v7/index/89e46367265a7ac8"


def archive(folder: Path, entry: str, pointer: bytes, name: str) -> None:
    write(
        folder,
        {f"{entry}.http": pointer + name.encode(), f"archive-v0/{name}/a/.libs/x.lock": b"", f"{entry}.lock": b""},
    )
    (folder / entry).symlink_to(os.path.relpath(f"archive-v0/{name}", os.path.dirname(entry)))


def test_uv_keeps_what_its_pointers_name_and_the_wheels_that_it_built(tmp_path: Path) -> None:
    archive(tmp_path, f"{HASH}/a/1-py3-none-any", b"\x95https://host/a.whl authorization\0\0\x8d", "One")
    made = "sdists-v9/pypi/b/1/revision/b-1-py3-none-any.whl"
    write(tmp_path, {
        f"{HASH}/a/1-py3-none-any.msgpack": b"\x81", "simple-v27/pypi/a.rkyv": b"x", "archive-v0/Lost/x.py": b"",
        "sdists-v9/pypi/b/1/revision/src/setup.py": b"", "sdists-v9/pypi/b/1/revision/src/b.msgpack": b"",
        "sdists-v9/path/c/revision.rev": b"", "interpreter-v5/x.msgpack": b"", made: PACKAGE,
        "sdists-v9/pypi/b/1/revision.http": b"https://host/b.tar.gz", "git-v0/db/x/config": b"url = https://me:pw@host",
    })  # fmt: skip
    expected = {f"{HASH}/a/1-py3-none-any.{more}" for more in ("http", "msgpack")}
    expected |= {"archive-v0/One/a/.libs/x.lock", "sdists-v9/pypi/b/1/revision.http", made}
    assert kept(packages.of_uv, tmp_path).keys() == expected


@pytest.mark.parametrize(
    "pointer",
    [
        b"\x95http://me:hunter2@host/a.whl",
        b"\x95http://me:" + b"x" * 1001 + b"@host/a.whl",
        b"https://host/a.whl?X-Amz-Signature=abc",
        b"url https://host/a.whl,https://host/b.whl?X-Amz-Signature=abc",
        b"authorizationBasic bWU6aHVudGVyMg==\0",
        b"authorizationx",
        b"\0Bearer abc",
        b"cookiesession=hunter2",
    ],
)
def test_an_entry_of_uv_with_what_may_be_a_login_is_left_out(tmp_path: Path, pointer: bytes) -> None:
    archive(tmp_path, f"{HASH}/a/1-py3-none-any", pointer, "One")
    archive(tmp_path, f"{HASH}/b/1-py3-none-any", b"https://host/b.whl\0", "Two")
    write(tmp_path, {"sdists-v9/url/c/revision.http": pointer, "sdists-v9/url/c/x/c-1-py3-none-any.whl": PACKAGE})
    found = kept(packages.of_uv, tmp_path).keys()
    assert found == {f"{HASH}/b/1-py3-none-any.http", "archive-v0/Two/a/.libs/x.lock"}


def test_a_pointer_of_uv_that_leads_elsewhere_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {f"{HASH}/a/1.http": b"x"})
    (tmp_path / HASH / "a" / "2.http").symlink_to("/etc/passwd")
    assert kept(packages.of_uv, tmp_path).keys() == {f"{HASH}/a/1.http"}


@pytest.mark.parametrize("word", [b"a://", b"a", b"a://b ", b"?"])
def test_a_file_of_uv_is_looked_through_in_linear_time(tmp_path: Path, word: bytes) -> None:
    """8 MiB of beginnings of URLs took 20 s of a processor."""
    write(tmp_path, {f"{HASH}/a/1-py3-none-any.rev": word * ((8 << 20) // len(word))})
    began = time.process_time()
    assert len(kept(packages.of_uv, tmp_path)) == 1
    assert time.process_time() - began < 5
