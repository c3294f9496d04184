"""Random trees and mutations: what a snapshot makes of the base is the tree that the command left, in all that a
file system keeps."""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path

import pytest

from bootseer import env
from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Outcome, Target, overlay

pytestmark = pytest.mark.root


class Tree:
    """Makes and changes a tree below ``root`` by the numbers of ``seed``: equal seeds, equal trees."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random = root, random.Random(seed)

    def all(self, kind: str = "") -> list[Path]:
        found = sorted(self.root.rglob("*"))
        is_right = {"": lambda _: True, "f": lambda p: p.is_file(), "d": lambda p: p.is_dir()}[kind]
        return [path for path in found if is_right(path) and (not kind or not path.is_symlink())]

    def folder(self) -> Path:
        return self.random.choice([self.root, *self.all("d")])

    def place(self) -> Path:
        """Nothing is there: through a link one would write to the host's own files."""
        while True:
            name = self.random.choice(["a", "b.py", "ü", "with space", ".hidden", "x" * 100, "new\nline"])
            path = self.folder() / f"{name}{self.random.randrange(1000)}"
            if not os.path.lexists(path):
                return path

    def content(self) -> bytes:
        return self.random.randbytes(self.random.choice([0, 1, 100, 4096, 5000, 70_000]))

    def time(self, path: Path) -> None:
        when = self.random.randrange(1, 2 * 10**18)
        os.utime(path, ns=(when, when), follow_symlinks=False)

    def new_file(self) -> None:
        path = self.place()
        path.write_bytes(self.content())
        path.chmod(self.random.choice([0o644, 0o600, 0o755, 0o444]))

    def sparse(self) -> None:
        with self.place().open("wb") as file:
            file.truncate(self.random.randrange(1 << 20))
            file.seek(self.random.randrange(1 << 19))
            file.write(self.content())

    def new_folder(self) -> None:
        path = self.place()
        path.mkdir()
        path.chmod(self.random.choice([0o755, 0o700, 0o1777]))

    def new_link(self) -> None:
        self.place().symlink_to(self.random.choice(["a", "../b", "nowhere", "/usr/bin/env"]))

    def change(self) -> None:
        for path in self.random.sample(files := self.all("f"), min(len(files), 2)):
            with path.open("r+b") as file:
                file.seek(self.random.randrange(5000))
                file.write(self.content())

    def remove(self) -> None:
        for path in self.random.sample(found := self.all(), min(len(found), 1)):
            (shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink)(path)

    def move(self) -> None:
        found = self.all()
        old, new = self.random.choice([*found, None]), self.place()
        if old and not new.is_relative_to(old) and not new.exists():
            old.rename(new)

    def other_kind(self) -> None:
        for path in self.random.sample(files := self.all("f"), min(len(files), 1)):
            path.unlink()
            path.mkdir()

    def attributes(self) -> None:
        for path in self.random.sample(found := self.all("f") + self.all("d"), min(len(found), 3)):
            path.chmod(self.random.choice([0o750, 0o711, 0o644 if path.is_file() else 0o755]))
            os.setxattr(path, f"user.{self.random.randrange(3)}", self.random.randbytes(20))
            self.time(path)

    def hard_links(self) -> None:
        path = self.place()
        path.write_bytes(self.content())
        for _ in range(2):
            os.link(path, self.place())

    def make(self) -> None:
        self.root.mkdir(parents=True)
        for _ in range(25):
            self.random.choice([self.new_file, self.new_folder, self.new_link, self.sparse])()
        for path in self.all()[::-1]:
            self.time(path)

    def mutate(self) -> int:
        acts = [self.new_file, self.new_folder, self.new_link, self.sparse, self.change, self.remove, self.move]
        acts += [self.other_kind, self.attributes, self.hard_links]
        for _ in range(self.random.randrange(1, 30)):
            self.random.choice(acts)()
        return 0


def seen(root: Path) -> dict[str, object]:
    out: dict[str, object] = {}
    groups: dict[tuple[int, int], list[str]] = {}
    for path in sorted(root.rglob("*")):
        info, name = path.lstat(), str(path.relative_to(root))
        row: list[object] = [oct(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns]
        if path.is_symlink():
            row.append(os.readlink(path))
        else:
            row.append({key: os.getxattr(path, key) for key in os.listxattr(path) if key.startswith("user.")})
        if stat.S_ISREG(info.st_mode):
            row += [info.st_size, path.read_bytes()]
            groups.setdefault((info.st_dev, info.st_ino), []).append(name)
        out[name] = row
    out[""] = sorted(group for group in groups.values() if len(group) > 1)
    return out


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.soak) for n in range(12, 400))])
def test_a_restored_tree_is_the_one_that_the_command_left(tmp_path: Path, seed: int) -> None:
    states: list[Path] = []

    def run(name: str, restore: str) -> tuple[EnvResult, Path]:
        tree = Tree(tmp_path / name / "env", seed)
        tree.make()
        config = Config(cache_dir=str(tmp_path / name / "cache"), state_dir=str(tmp_path / name / "state"))
        states.append(Path(config.state_dir))
        spec = EnvSpec(
            targets=(Target("/opt/env", str(tree.root)),), command=("x",), image_digest="sha256:1",
            restore=restore, background=False,
        )  # type: ignore[arg-type]  # fmt: skip
        return env.run(spec, tree.mutate, store_url=str(tmp_path / f"store-{restore}"), config=config), tree.root

    try:
        for restore, outcome in (("mount", Outcome.RESTORED_MOUNT), ("unpack", Outcome.RESTORED_UNPACK)):
            result, left = run(f"{restore}-first", restore)
            assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
            wanted = seen(left)
            again, restored = run(f"{restore}-again", restore)
            assert again.outcome is outcome, again.reason
            assert seen(restored) == wanted
    finally:
        for folder in states[::-1]:
            for group in overlay.groups(folder)[::-1]:
                group.unmount()
