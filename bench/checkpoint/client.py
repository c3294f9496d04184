"""One resume or save of bench/checkpoint, in a process of its own: as `client`, with the ways of checkpoints.

    python -m bench.checkpoint.client TASK

Ways that read: ``torch`` (`bootseer.torch.load`), ``torch-file`` (torch.load of the local file ``path``),
``torch-mmap`` (the same with ``mmap=True``), ``torch-native`` (torch.load of hdfs-native's file object), ``dcp``;
``tensors`` (each tensor of the local safetensors file ``path``, by ``safe_open``), ``tensors-shuffled``,
``tensors-some`` (every `EVERY`th, as one of so many ranks may want). Ways that write the state dict of ``source``:
``torch`` (`bootseer.torch.save`), ``torch-file`` (torch.save to a local path), ``dcp`` (by 2 processes).
"""

from __future__ import annotations

import io
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from hdfs_native import FileReader
from safetensors import safe_open

import bootseer.torch
from bench.checkpoint.state import State, digest_of
from bench.stripes.client import WAYS, Task, Way, main
from bootseer.hdfs import client as hdfs


def _loading(load: Callable[[], object]) -> tuple[Callable[[], None], Callable[[], str]]:
    found: list[State] = []

    def work() -> None:
        state = cast(State, load())
        for tensor in state.values():  # what is mapped only has been read when each page was touched
            tensor.reshape(-1).view(torch.uint8)[::4096].sum()
        found.append(state)

    return work, lambda: digest_of(found[0])


def load_file(task: Task, *, mmap: bool = False) -> tuple[Callable[[], None], Callable[[], str]]:
    return _loading(lambda: torch.load(task.path, weights_only=True, mmap=mmap))


EVERY = 4


def some(names: Sequence[str]) -> Sequence[str]:
    """What one of `EVERY` ranks wants."""
    return names[::EVERY]


def shuffled(names: Sequence[str]) -> Sequence[str]:
    return random.Random(0).sample(names, len(names))


def load_tensors(
    task: Task, wanted: Callable[[Sequence[str]], Sequence[str]] = sorted
) -> tuple[Callable[[], None], Callable[[], str]]:
    """They are mapped: their bytes come in the order in which they are touched."""

    def load() -> State:
        with safe_open(task.path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in wanted(sorted(file.keys()))}

    return _loading(load)


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
    return _saving(task, lambda state: torch.save(state, task.path))


# -- torch.distributed.checkpoint: this process is rank 0 of 2, each has every second tensor ------------------------


def save_dcp(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    context = multiprocessing.get_context("spawn")
    begin, theirs = context.Pipe()
    folder = tempfile.TemporaryDirectory(prefix="bench-gloo-")
    other = context.Process(target=_second_rank, args=(task, folder.name, theirs), daemon=True)
    other.start()
    theirs.close()
    state = cast(State, torch.load(task.source, weights_only=True))
    share = _join(state, 0, folder.name)
    begin.recv()

    def work() -> None:
        begin.send("go")
        _save_share(task, share)
        begin.recv()

    def content() -> str:
        other.join()
        torch.distributed.destroy_process_group()
        folder.cleanup()
        return digest_of(state)

    return work, content


def _second_rank(task: Task, folder: str, begin: Connection) -> None:
    share = _join(cast(State, torch.load(task.source, weights_only=True)), 1, folder)
    begin.send("ready")
    begin.recv()
    _save_share(task, share)
    begin.send("done")
    torch.distributed.destroy_process_group()


def _join(state: State, rank: int, folder: str) -> State:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return {name: state[name] for name in sorted(state)[rank::2]}


def _save_share(task: Task, share: State) -> None:
    dcp.save(share, storage_writer=bootseer.torch.StorageWriter(f"{task.url}/{task.path}"))


def load_dcp(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    """By one process."""

    def load() -> State:
        reader = bootseer.torch.StorageReader(f"{task.url}/{task.path}")
        tensors = reader.read_metadata().state_dict_metadata.items()
        state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in tensors}
        dcp.load(state, storage_reader=reader)
        return state

    return _loading(load)


CHECKPOINT_WAYS: dict[tuple[str, bool], Way] = {
    ("torch-file", False): load_file,
    ("torch-mmap", False): partial(load_file, mmap=True),
    ("tensors", False): load_tensors,
    ("tensors-shuffled", False): partial(load_tensors, wanted=shuffled),
    ("tensors-some", False): partial(load_tensors, wanted=some),
    ("torch-native", False): load_native,
    ("torch", False): load_url,
    ("dcp", False): load_dcp,
    ("torch", True): save_url,
    ("torch-file", True): save_file,
    ("dcp", True): save_dcp,
}


if __name__ == "__main__":
    main({**WAYS, **CHECKPOINT_WAYS})
