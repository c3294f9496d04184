"""One resume or save of bench/checkpoint, in a process of its own: as `_stripes_client`, with the ways of checkpoints.

    python bench/_checkpoint_client.py TASK

Ways that read: ``torch`` (`bootseer.torch.load`), ``torch-file`` (torch.load of the local file ``path``),
``torch-native`` (torch.load of hdfs-native's file object). Ways that write the state dict of ``source``: ``torch``
(`bootseer.torch.save`), ``torch-file`` (torch.save to a local path, fsync).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import cast

import torch
from hdfs_native import FileReader

import bootseer.torch
from _checkpoint_state import State, digest_of
from _stripes_client import WAYS, Task, Way, main
from bootseer.hdfs import client as hdfs


def _loading(load: Callable[[], object]) -> tuple[Callable[[], None], Callable[[], str]]:
    found: list[State] = []

    def work() -> None:
        state = cast(State, load())
        for tensor in state.values():  # what is mapped only has been read when each page was touched
            tensor.reshape(-1).view(torch.uint8)[::4096].sum()
        found.append(state)

    return work, lambda: digest_of(found[0])


def load_file(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    return _loading(lambda: torch.load(task.path, weights_only=True))


class NativeFile:
    """What torch.load needs of a file object, over a reader of hdfs-native, whose own readinto is not implemented."""

    def __init__(self, reader: FileReader) -> None:
        self.read, self.tell, self.seek = reader.read, reader.tell, reader.seek

    def readline(self) -> bytes:
        raise io.UnsupportedOperation("torch.load reads no lines of what torch.save has written")


def load_native(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    client = hdfs.connect(task.url)
    path = f"{hdfs.split(task.url)[1]}/{task.path}"
    return _loading(
        lambda: client.call(
            lambda native: torch.load(NativeFile(native.read(path)), weights_only=True), f"load {path}", deadline=600.0
        )
    )


def load_url(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    return _loading(lambda: bootseer.torch.load(f"{task.url}/{task.path}"))


def _saving(task: Task, save: Callable[[State], None]) -> tuple[Callable[[], None], Callable[[], str]]:
    state = cast(State, torch.load(task.source, weights_only=True))
    return lambda: save(state), lambda: digest_of(state)


def save_url(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    return _saving(task, lambda state: bootseer.torch.save(state, f"{task.url}/{task.path}"))


def save_file(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    def save(state: State) -> None:
        with open(task.path, "wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())

    return _saving(task, save)


CHECKPOINT_WAYS: dict[tuple[str, bool], Way] = {
    ("torch-file", False): load_file,
    ("torch-native", False): load_native,
    ("torch", False): load_url,
    ("torch", True): save_url,
    ("torch-file", True): save_file,
}


if __name__ == "__main__":
    main({**WAYS, **CHECKPOINT_WAYS})
