"""Which node of which attempt this is, from the variables the job's own launcher sets.

Sources: Slurm (``SLURM_NODEID``, ``SLURM_NNODES``, ``SLURM_RESTART_COUNT``), torchrun (``GROUP_RANK``,
``TORCHELASTIC_RESTART_COUNT``), Kubernetes indexed jobs (``JOB_COMPLETION_INDEX``), Open MPI; ``BOOTSEER_*`` wins.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import msgspec

from bootseer.errors import ConfigError

_RANK = (
    "BOOTSEER_NODE_RANK",
    "GROUP_RANK",
    "SLURM_NODEID",
    "JOB_COMPLETION_INDEX",
    "OMPI_COMM_WORLD_RANK",
    "NODE_RANK",
)
_ATTEMPT = ("BOOTSEER_ATTEMPT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


class Identity(msgspec.Struct, frozen=True):
    """Identity of one start: (job, attempt, cycle) on one node."""

    job: str
    attempt: int
    """-1: nobody said; the launcher counts the starts it finds."""
    cycle: int
    node: str
    rank: int
    """The node's number in the job, not a process's rank: that one is the training framework's to say."""

    def environ(self, gpus: int) -> dict[str, str]:
        """The variables by which emitters in any process of this start know who they are."""
        return {
            "BOOTSEER_JOB": self.job,
            "BOOTSEER_ATTEMPT": str(self.attempt),
            "BOOTSEER_CYCLE": str(self.cycle),
            "BOOTSEER_NODE": self.node,
            "BOOTSEER_NODE_RANK": str(self.rank),
            "BOOTSEER_GPUS": str(gpus),
        }


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int = 0) -> int:
    for name in names:
        if text := environ.get(name):
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r} is not a number")
            return int(text)
    return default


def identify(job: str, environ: Mapping[str, str] | None = None) -> Identity:
    """The identity of this start of ``job``. Raises `ConfigError` for a variable that is not a number."""
    env = os.environ if environ is None else environ
    return Identity(
        job=env.get("BOOTSEER_JOB") or job,
        attempt=_number(env, _ATTEMPT, -1),
        cycle=_number(env, ("BOOTSEER_CYCLE",)),
        node=env.get("BOOTSEER_NODE") or env.get("SLURMD_NODENAME") or socket.gethostname(),
        rank=_number(env, _RANK),
    )
