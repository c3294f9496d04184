"""A neighbour in every folder that root touches: work there goes on, ends right or in one line, and leads nowhere.

Each case is a folder that belongs to another user, who races links, pipes, sparse files and sockets into it, and what
root does with it. Nothing outside may be written, given away or read by it, and nothing hangs or takes the memory.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bootseer.backends.folder import FolderBackend
from bootseer.env import EnvSpec, Target, key
from bootseer.image.container import user_of
from bootseer.kernel import beneath, libc
from bootseer.launch.ready import ReadyWatch
from bootseer.objects.folder import FolderStore
from bootseer.profile.index import Index
from bootseer.stripefs.store import StripeFS
from support.neighbour import LEAST, NOBODY, Neighbour, Outside, Repeated, place, repeated

pytestmark = pytest.mark.root


class Case(msgspec.Struct):
    """``act`` is called with 0, 1, 2, ... while a neighbour races in ``theirs``, with ``names`` that it likes and with
    ``sparse`` files of that size."""

    act: Callable[[int], object]
    names: list[str]
    sparse: int = 1 << 40


def store(theirs: Path, _: Path) -> Case:
    """What nodes do with a store, by few keys: publish, read, list, remove."""
    folders = ("profiles/tree/default", "leases/env/key", "env/snapshots/key")
    for name in folders:
        (theirs / name).mkdir(parents=True)
    used = FolderStore(theirs)

    def act(number: int) -> None:
        name = f"{folders[number % 3]}/{number // 3 % 4}"
        data = f"right {name}".encode()
        used.put(name, data, overwrite=bool(number % 2))
        assert used.get(name, most=100) == data
        used.stat(name)
        list(used.list(folders[number % 3]))
        with used.open(name) as source:
            source.read(0, min(source.size, 5))
        used.delete(name)

    return Case(act, ["default", "0", "new", "key", "tree"])


def checkpoint(theirs: Path, ours: Path) -> Case:
    """A checkpoint of small and striped files: saved, listed, verified, read, removed."""
    source, copy = ours / "source", ours / "copy"
    source.write_bytes(secrets.token_bytes(300_000))
    (theirs / "ck/step-1").mkdir(parents=True)
    fs = StripeFS(FolderBackend(theirs))

    def act(number: int) -> None:
        name = f"ck/step-{number % 2}/weights-{number // 2 % 2}"
        fs.put(source, name, width=2, unit=1 << 17)
        fs.ls("ck")
        fs.get(name, copy)
        assert copy.read_bytes() == source.read_bytes()
        fs.verify("ck")
        if number % 5 == 0:
            fs.remove_tree("ck/step-1")

    # a check reads whatever is there: more than the memory holds, and no more than takes seconds
    return Case(act, ["ck", "step-1", "weights-0", "COMMIT"], sparse=1 << 32)


def key_files(theirs: Path, _: Path) -> Case:
    """The files that a key is made of, and what they include."""
    (theirs / "requirements.txt").write_text("-r more/other.txt\nnumpy==1.0\n")
    (theirs / "more").mkdir()
    (theirs / "more/other.txt").write_text("-r ../secret\n-c ../../outside/secret\n")
    spec = EnvSpec(
        targets=(Target("/opt/env", str(theirs.parent / "env")),),
        command=("true",),
        key_files=(str(theirs / "requirements.txt"),),
        image_digest="sha256:1",
    )

    def act(_: int) -> None:
        document = key.build(spec)
        assert "only root may read this" not in str(document)

    return Case(act, ["requirements.txt", "other.txt", "more", "secret"])


def image_files(theirs: Path, _: Path) -> Case:
    """The users and groups of an image."""
    (theirs / "etc").mkdir()
    (theirs / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nme:x:1000:1000::/home/me:/bin/sh\n")
    (theirs / "etc/group").write_text("root:x:0:\nus:x:1000:me\n")
    return Case(lambda _: user_of(theirs, "me:us"), ["etc", "passwd", "group"])


def events(theirs: Path, _: Path) -> Case:
    """Event files of a job in a shared folder: looked at for pages, and watched for the first step."""
    folder = theirs / "job/attempt-1"
    folder.mkdir(parents=True)
    line = b'{"v":1,"ev":"begin","span":"a","stage":"first_step","t":1.0,"mono":1.0,"job":"j","node":"n"}\n'
    (folder / "n.jsonl").write_bytes(line)

    def act(_: int) -> None:
        Index([theirs]).refresh()
        watch = ReadyWatch(folder / "n.jsonl", lambda: None)
        watch.start()
        watch.stop()

    return Case(act, ["job", "attempt-1", "n.jsonl", "x.jsonl", "y.parquet"])


CASES = {made.__name__: made for made in (store, checkpoint, key_files, image_files, events)}


class Seen(msgspec.Struct):
    """What came of a case: its ends, what changed outside, and which of our files tell what root alone may read."""

    ends: Repeated
    changed: list[str]
    told: list[str]

    @property
    def harm(self) -> bool:
        return bool(self.changed or self.told or self.ends.wrong)


def raced(make: Callable[[Path, Path], Case], seconds: float) -> Seen:
    with place() as folder:
        outside, theirs, ours = Outside(folder / "outside"), folder / "theirs", folder / "ours"
        theirs.mkdir()
        ours.mkdir(mode=0o700)
        case = make(theirs, ours)
        for path in (theirs, *theirs.rglob("*")):
            os.lchown(path, NOBODY, NOBODY)
        case.act(0)  # all is right as long as nobody races
        with Neighbour([theirs], case.names, outside, sparse=case.sparse):
            ends = repeated(case.act, seconds, each=60)
        return Seen(ends, outside.changes(), [*outside.told(ours), *outside.told(theirs)])


@pytest.mark.parametrize("name", CASES)
def test_nothing_leads_outside(name: str, neighbour_seconds: float) -> None:
    seen = raced(CASES[name], neighbour_seconds)
    print(seen.ends.ends)
    assert seen.changed == []
    assert seen.told == []
    assert seen.ends.wrong == []
    assert sum(seen.ends.ends.values()) >= LEAST, "it went on"


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("store", "checkpoint", "key_files") else pytest.param(name, marks=pytest.mark.soak)
        for name in CASES
    ],
)
def test_without_protection_it_would(name: str, neighbour_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where names are simply opened, the same neighbour does harm."""
    opened = os.open

    def plain(path: str | bytes, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        return opened(path, flags & ~(os.O_NOFOLLOW | os.O_NONBLOCK), mode, dir_fd=dir_fd)

    def below(root: int, path: bytes, flags: int, mode: int = 0) -> int:
        return plain(path, flags, mode, dir_fd=root)

    def regular(path: str | os.PathLike[str], *, root: int | None = None) -> int:
        return plain(os.fspath(path), os.O_RDONLY, dir_fd=root)

    monkeypatch.setattr(os, "open", plain)
    monkeypatch.setattr(libc, "open_beneath", below)
    monkeypatch.setattr(libc, "open_in_root", below)
    monkeypatch.setattr(beneath, "open_regular", regular)
    if name == "key_files":  # what is opened is looked at, too, where root opens it
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    end = time.monotonic() + 20 * neighbour_seconds
    while not (seen := raced(CASES[name], neighbour_seconds)).harm:
        assert time.monotonic() < end, seen
