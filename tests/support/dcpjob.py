"""A small training job for tests of checkpoints: ranks with a gloo group, FSDP2, AdamW; what a rank did comes back."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from blake3 import blake3

PATIENCE = 150.0
"""Seconds for all ranks to end."""
WIDTH, UNIT = 3, 64 << 10
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "bootseer.torch.dcp_writer",
    ]
)


def run(world: int, action: str, *args: Any, kill: tuple[int, str] | None = None, fails: bool = False) -> list[Any]:
    """``action`` (a function below) on ``world`` ranks; what each returned, in order.

    ``kill``: (rank, fault point@visit): that rank is killed there; then nothing is returned. ``fails``: each raises,
    and its error is what comes back.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(world):
        mine, theirs = _context.Pipe()
        faults = "=kill@".join(kill[1].split("@")) if kill and kill[0] == rank else ""
        process = _context.Process(target=_main, args=(rank, world, store.port, faults, action, args, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    end = time.monotonic() + PATIENCE
    try:
        if kill:
            processes[kill[0]].join(PATIENCE)
            assert processes[kill[0]].exitcode == -9, f"rank {kill[0]} was not killed at {kill[1]}"
            return []
        found = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(0, end - time.monotonic())), f"rank {rank} does not end"
            good, result = pipe.recv()
            assert good is not fails, f"rank {rank}: {result}"
            found.append(result)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _main(rank: int, world: int, port: int, faults: str, action: str, args: tuple[Any, ...], pipe: Connection) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["BOOTSEER_FAULTS"] = faults
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=world)
    try:
        pipe.send((True, globals()[action](*args)))
    except BaseException as exc:
        failures = getattr(exc, "failures", None)
        said = str(next(iter(failures.values()))[0]) if failures else traceback.format_exc()
        pipe.send((False, said))
    finally:
        pipe.close()
        os._exit(0)  # without gloo's farewell, which waits for the dead


def trained(seed: int = 0, steps: int = 2, mesh: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """A model and its optimizer, sharded over all ranks (``mesh``: (replicas, shards)), after some steps.

    20 MB with the optimizer. The data are those of one process: so is the result, whatever the number of ranks.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(601, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1001))
    names = ("replicas", "shards") if len(mesh) == 2 else ("shards",)
    where = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        _step(model, optimizer)
    return model, optimizer


def _step(model: Any, optimizer: Any) -> float:
    import torch

    generator = torch.Generator().manual_seed(7)
    loss = model(torch.randn(4, 601, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _digest(model: Any, optimizer: Any) -> str:
    """Of all parameters and of the optimizer's state, as one process would have them."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    found = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    digest = blake3()

    def add(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy().data))
        else:
            digest.update(f"{name} {value!r}".encode())

    add("", {"model": found[0], "optimizer": found[1]})
    return digest.hexdigest()


def _state(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    parameters, state = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": state, "step": step}


def save(url: str, mesh: tuple[int, ...] = (), how: str = "sync", seed: int = 0) -> str:
    """Train and save; the digest of what was saved. ``how``: sync, thread, process, fsspec (torch's own writer)."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from bootseer.torch import StorageWriter

    model, optimizer = trained(seed, mesh=mesh)
    state = _state(model, optimizer, 2)
    if how == "fsspec":
        dcp.save(state, storage_writer=FsspecWriter(url, sync_files=False))
    elif how == "sync":
        dcp.save(state, storage_writer=StorageWriter(url, width=WIDTH, unit=UNIT))
    else:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        dist.barrier()
        dcp.async_save(
            state,
            storage_writer=StorageWriter(url, width=WIDTH, unit=UNIT),
            async_checkpointer_type=AsyncCheckpointerType(how),
        ).result()
    return _digest(model, optimizer)


def load(url: str, mesh: tuple[int, ...] = (), shared: bool = False) -> tuple[str, int, float]:
    """Load into a job with other parameters: digest, step, and the loss of the next step. ``shared``: read once."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    from bootseer.torch import StorageReader

    model, optimizer = trained(seed=1, steps=1, mesh=mesh)
    state = _state(model, optimizer, 0)
    dcp.load(state, storage_reader=StorageReader(url, group=dist.group.WORLD if shared else None))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _digest(model, optimizer), state["step"], _step(model, optimizer)


def _own(value: int) -> dict[str, Any]:
    """What every rank has, and what each has for itself: 6 MB of either."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    return {
        "shared": torch.full((1_500_000,), float(value)),
        f"own-{rank}": torch.full((1_500_000,), 10 * value + rank),
        f"note-{rank}": f"{value} of {rank}",
    }


def save_own(url: str, value: int) -> None:
    import torch.distributed.checkpoint as dcp

    from bootseer.torch import StorageWriter

    dcp.save(_own(value), storage_writer=StorageWriter(url, width=WIDTH, unit=UNIT))


def load_own(url: str, value: int) -> str:
    """ "" when all is there."""
    import torch
    import torch.distributed.checkpoint as dcp

    from bootseer.torch import StorageReader

    loaded, expected = _own(0), _own(value)
    dcp.load(loaded, storage_reader=StorageReader(url))
    wrong = [
        key
        for key, found in loaded.items()
        if not (torch.equal(found, expected[key]) if isinstance(found, torch.Tensor) else found == expected[key])
    ]
    return ", ".join(wrong)


def load_shared(url: str, size: int) -> tuple[bool, int, int]:
    """Load a tensor that every rank needs, once for all: whether it is right, bytes read from the store, calls."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from bootseer.torch import StorageReader, dcp_reader

    reports: list[Any] = []
    module: Any = dcp_reader
    real = module.read_shared

    def noted(*args: Any) -> Any:
        reports.append(real(*args))
        return reports[-1]

    module.read_shared = noted
    state = {"w": torch.zeros(size)}
    dcp.load(state, storage_reader=StorageReader(url, group=dist.group.WORLD))
    return torch.equal(state["w"], torch.arange(float(size))), sum(found.read for found in reports), len(reports)
