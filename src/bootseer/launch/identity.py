"""Which node of which attempt this is, from the variables of the job's launcher: Slurm, torchrun, Kubernetes indexed
jobs (``JOB_COMPLETION_INDEX``), Open MPI; ``BOOTSEER_*`` wins."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping

import msgspec

from bootseer import ranks
from bootseer.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Identity(msgspec.Struct, frozen=True):
    """Identity of one start: (job, attempt, cycle) on one node."""

    job: str
    attempt: str
    """Empty: nobody has named it; the launcher counts the attempts it finds."""
    cycle: int
    node: str
    rank: int
    """The node's number in the job, not a process's rank: that one is the training framework's to say."""
    nodes: int = 0
    """How many nodes the start has; 0: nobody said."""
    nodelist: str = ""
    """Their names, as Slurm writes them (`bootseer.profile.hostlist`); empty: nobody said."""
    restarts: int = 0
    """How often torchrun, which started this, has restarted it; a part of ``cycle``."""

    def environ(self, gpus: int) -> dict[str, str]:
        """The variables by which emitters in any process of this start know who they are."""
        return {
            "BOOTSEER_JOB": self.job,
            "BOOTSEER_ATTEMPT": self.attempt,
            "BOOTSEER_CYCLE": str(self.cycle - self.restarts),  # emitters see torchrun's variable, too
            "BOOTSEER_NODE": self.node,
            "BOOTSEER_NODE_RANK": str(self.rank),
            "BOOTSEER_GPUS": str(gpus),
        }


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        if text := environ.get(name):
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r} is not a number")
            return int(text)
    return 0


def _attempt(environ: Mapping[str, str]) -> str:
    """The same on all nodes of a start, and another one for each start; empty where nobody says it."""
    if named := environ.get("BOOTSEER_ATTEMPT"):
        return named
    job, step, run = (environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"))
    if job and step:
        named = f"{job}.{environ.get('SLURM_RESTART_COUNT') or 0}.{step}"
    elif run and run != "none":  # torchrun's run id where nobody chose one
        named = f"{run}.0"  # its restarts are cycles
    else:
        return ""
    name = re.sub(r"[^A-Za-z0-9.-]", "_", named)
    return name if _NAME.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:16]


def _name(what: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ConfigError(
            f"the {what} {text!r} cannot name a file",
            hint="use up to 100 letters, digits, dots, dashes and underscores",
        )
    return text


def identify(job: str, environ: Mapping[str, str] | None = None) -> Identity:
    """The identity of this start of ``job``. Raises `ConfigError` for a variable that is no number or no name, and when
    torchrun started several of these on one node."""
    env = os.environ if environ is None else environ
    attempt, restarts = _attempt(env), _number(env, ("NVRX_CYCLE", "TORCHELASTIC_RESTART_COUNT"))
    if env.get("TORCHELASTIC_RUN_ID") and (local := _number(env, ("LOCAL_WORLD_SIZE",))) > 1:
        raise ConfigError(
            f"torchrun has started bootseer run {local} times on this node, and each would start the whole job",
            hint='put bootseer outside: torchrun belongs in the job file, [job] command = ["torchrun", ...]',
        )
    return Identity(
        job=_name("job", env.get("BOOTSEER_JOB") or job),
        attempt=_name("attempt", attempt) if attempt else "",
        cycle=_number(env, ("BOOTSEER_CYCLE",)) + restarts,
        node=_name("node", env.get("BOOTSEER_NODE") or env.get("SLURMD_NODENAME") or socket.gethostname()),
        rank=_number(env, ranks.NODE_RANKS),
        nodes=_number(env, ranks.NODES),
        nodelist=env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "",
        restarts=restarts,
    )
