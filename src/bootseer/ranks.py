"""The number of a node in its job, and how many there are, from the variables that the job's launcher sets."""

from __future__ import annotations

from collections.abc import Mapping

NODE_RANKS = (
    "BOOTSEER_NODE_RANK",
    "GROUP_RANK",
    "SLURM_NODEID",
    "JOB_COMPLETION_INDEX",
    "OMPI_COMM_WORLD_RANK",
    "NODE_RANK",
)
"""Of a node: torchrun sets GROUP_RANK, Kubernetes JOB_COMPLETION_INDEX; mpirun, which starts one `bootseer run` on each
node, the rank of that."""
NODES = ("BOOTSEER_NODES", "GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "OMPI_COMM_WORLD_SIZE")
"""How many nodes there are."""
_MOST = (1 << 31) - 1


def first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of the variables ``names`` that is a number; None where none is."""
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= _MOST:
            return int(text)
    return None
