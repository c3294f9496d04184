"""Random histories of a striped store against a reference model: a dictionary says what must be there.

Over a folder, and with fewer and shorter examples over real HDFS. After every history fsck finds nothing that the
model does not explain, and collecting garbage changes nothing: nobody was killed here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError
from bootseer.stripefs import open_fs
from bootseer.stripefs.maintenance import check, collect
from support import hadoop

UNIT = 4096
FOLDERS = ["run/step-1", "run/step-2", "run/step-30", "run/last"]
PATHS = st.builds("{}/{}".format, st.sampled_from(FOLDERS), st.sampled_from(["a", "b", "sub/c"]))
SIZES = st.sampled_from([0, 1, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT, 10 * UNIT + 7])
STEPS = {"run/step-1": 1, "run/step-2": 2, "run/step-30": 30, "run/last": -1}


@dataclass(frozen=True)
class File:
    """``version`` is new with every write of a striped file, and stays when it is renamed."""

    data: bytes
    striped: bool
    version: int


class Model(RuleBasedStateMachine):
    """`url` is called for a fresh, empty store; `done` after the history."""

    def __init__(self) -> None:
        super().__init__()
        self.fs = open_fs(self.url())
        self.files: dict[str, File] = {}
        self.commits: dict[str, dict[str, File]] = {}
        self.order: list[str] = []
        self.count = 0

    def url(self) -> str:
        raise NotImplementedError

    def _data(self, size: int) -> bytes:
        self.count += 1
        return bytes((self.count * 31 + i) % 251 for i in range(251)) * (size // 251 + 1)

    def _store(self, path: str, data: bytes, striped: bool) -> None:
        self.files[path] = File(data, striped, self.count)

    @rule(path=PATHS, size=SIZES, striped=st.booleans(), width=st.integers(1, 5), pieces=st.integers(1, 4))
    def put(self, path: str, size: int, striped: bool, width: int, pieces: int) -> None:
        data = self._data(size)[:size]
        with self.fs.create(path, striped=striped, unit=UNIT, width=width) as out:
            for index in range(pieces):
                out.write(data[size * index // pieces : size * (index + 1) // pieces])
        self._store(path, data, striped)

    @rule(path=PATHS, size=SIZES)
    def append(self, path: str, size: int) -> None:
        old = self.files.get(path, File(b"", False, 0))
        data = self._data(size)[:size]
        with self.fs.append(path, unit=UNIT) as out:
            assert out.size == len(old.data)
            out.write(data)
        self._store(path, old.data + data, old.striped)

    @rule(path=PATHS)
    def abandon(self, path: str) -> None:
        with contextlib.suppress(ZeroDivisionError), self.fs.create(path, striped=True, unit=UNIT) as out:
            out.write(b"never seen" * 1000)
            raise ZeroDivisionError

    def _listed(self, path: str) -> bool:
        return any(path in files for files in self.commits.values())

    def _in_commit(self, path: str) -> bool:
        return any(path.startswith(f"{folder}/") for folder in self.commits)

    @rule(path=PATHS, force=st.booleans())
    def unlink(self, path: str, force: bool) -> None:
        if self._listed(path) and not force:
            with pytest.raises(NotWritableError):
                self.fs.remove(path)
        elif path in self.files:
            self.fs.remove(path, force=force)
            del self.files[path]
        else:
            with pytest.raises(NotFoundError):
                self.fs.remove(path, force=force)

    @rule(src=PATHS, dst=PATHS, overwrite=st.booleans(), force=st.booleans())
    def rename(self, src: str, dst: str, overwrite: bool, force: bool) -> None:
        if src not in self.files:
            with pytest.raises(NotFoundError):
                self.fs.rename(src, dst, overwrite=overwrite, force=force)
        elif src != dst and not force and (self._listed(src) or self._in_commit(dst)):
            with pytest.raises(NotWritableError):
                self.fs.rename(src, dst, overwrite=overwrite)
        elif dst in self.files and not overwrite and src != dst:
            with pytest.raises(NotWritableError):
                self.fs.rename(src, dst, overwrite=False, force=force)
        else:
            self.fs.rename(src, dst, overwrite=overwrite, force=force)
            moved = self.files.pop(src)
            self.count += 1
            other = moved.striped and src.rpartition("/")[0] != dst.rpartition("/")[0]
            self.files[dst] = File(moved.data, moved.striped, self.count) if other else moved

    @rule(path=PATHS, data=st.data())
    def read(self, path: str, data: st.DataObject) -> None:
        if path not in self.files:
            with pytest.raises(NotFoundError):
                self.fs.open(path)
            return
        expected = self.files[path].data
        with self.fs.open(path) as file:
            assert file.size == len(expected)
            start = data.draw(st.integers(0, len(expected)))
            end = data.draw(st.integers(start, len(expected)))
            assert file.read(start, end - start) == expected[start:end]
        assert self.fs.stat(path).striped == self.files[path].striped

    def _below(self, folder: str) -> dict[str, File]:
        return {path: file for path, file in self.files.items() if path.startswith(f"{folder}/")}

    @rule(folder=st.sampled_from(FOLDERS))
    def commit(self, folder: str) -> None:
        there = self._below(folder)
        if folder in self.commits or not there:
            with pytest.raises((NotWritableError, DataError, NotFoundError)):
                self.fs.commit(folder)
            return
        self.fs.commit(folder)
        self.commits[folder] = there
        self.order.append(folder)

    @rule(folder=st.sampled_from(FOLDERS))
    def remove_tree(self, folder: str) -> None:
        with contextlib.suppress(NotFoundError):  # also a folder that was never made
            self.fs.remove_tree(folder)
        for path in self._below(folder):
            del self.files[path]
        if folder in self.commits:
            del self.commits[folder]
            self.order.remove(folder)

    @precondition(lambda self: self.commits)
    @rule(src=st.sampled_from(FOLDERS), dst=st.sampled_from(FOLDERS))
    def rename_folder(self, src: str, dst: str) -> None:
        if src == dst or src not in self.commits or self._exists(dst):
            return
        self.fs.rename(src, dst)
        for path, file in self._below(src).items():
            del self.files[path]
            self.files[dst + path.removeprefix(src)] = file
        listed = self.commits.pop(src)
        self.commits[dst] = {dst + path.removeprefix(src): file for path, file in listed.items()}
        self.order[self.order.index(src)] = dst

    def _exists(self, path: str) -> bool:
        try:
            self.fs.stat(path)
        except NotFoundError:
            return False
        return True

    def _complete(self, folder: str) -> bool:
        return folder in self.commits and all(
            (now := self.files.get(path)) is not None
            and now.striped == was.striped
            and (now.version == was.version if was.striped else len(now.data) == len(was.data))
            for path, was in self.commits[folder].items()
        )

    @rule()
    def latest(self) -> None:
        complete = sorted(filter(self._complete, self.commits), key=lambda it: (STEPS[it], self.order.index(it)))
        if complete:
            assert self.fs.latest("run") == complete[-1]
        elif self._exists("run"):
            with pytest.raises(NotFoundError):
                self.fs.latest("run")
        for folder in self.commits:
            if self._complete(folder):
                assert len(self.fs.checkpoint(folder).files) == len(self.commits[folder])
            else:
                with pytest.raises(DataError):
                    self.fs.checkpoint(folder)

    @rule()
    def check(self) -> None:
        if not self._exists("run"):
            return
        report = check.fsck(self.fs.backend, "run")
        broken = {path for folder in self.commits if not self._complete(folder) for path in self.commits[folder]}
        for finding in report.findings:
            assert finding.kind in ("commit-lacks-file", "commit-other-file"), finding
            assert finding.path in broken
        assert collect.gc(self.fs.backend, "run", age=0) == []

    @invariant()
    def names(self) -> None:
        if self._exists("run"):
            found = {path for path in self.fs.files("run") if path.rpartition("/")[2] != "COMMIT"}
            assert found == set(self.files)

    def teardown(self) -> None:
        self.check()
        self.latest()
        for path, file in self.files.items():
            with self.fs.open(path) as opened:
                assert opened.read(0, opened.size) == file.data
        with contextlib.suppress(BootseerError):
            self.fs.backend.remove_folder("")


class OverFolder(Model):
    def url(self) -> str:
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a disk's fsync would take most of the time
        self._root = tempfile.mkdtemp(prefix="bootseer-model-", dir=memory)
        return self._root

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self._root, ignore_errors=True)


class OverHdfs(Model):
    def url(self) -> str:
        return f"{hadoop.shared().url}/{uuid.uuid4().hex}"


def test_a_folder_behaves_like_the_model():
    run_state_machine_as_test(OverFolder)


@pytest.mark.hdfs
def test_hdfs_behaves_like_the_model(request):
    """Each example takes seconds here."""
    run_state_machine_as_test(OverHdfs, settings=settings(max_examples=6 if request.config.option.soak else 3))
