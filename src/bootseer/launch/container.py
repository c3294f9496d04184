"""The job's container: one root file system in which the set-up command and then the training command run. An ordinary
user's is `image.user`: what a command writes in the image itself ends with the command, so that targets of the set-up
command are folders of this host (`Container.keep`)."""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import bootseer
from bootseer import env, image
from bootseer.errors import ConfigError
from bootseer.image import user
from bootseer.image.cdi import Selection
from bootseer.image.container import Bind, user_of
from bootseer.launch.job import Job
from bootseer.oci import ContainerConfig, ImageConfig
from bootseer.profile import emit
from bootseer.profile.auto import variables

log = logging.getLogger(__name__)

EVENTS_DIR = "/run/bootseer/events"
PYTHON_DIR = "/run/bootseer/python"
_NAMES = """
    RANK LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES
    TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE
    TORCHELASTIC_ERROR_FILE TORCHELASTIC_ENABLE_FILE_TIMER NVRX_CYCLE
    SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME SLURM_JOB_USER SLURM_JOB_ACCOUNT SLURM_JOB_PARTITION SLURM_JOB_QOS
    SLURM_JOB_RESERVATION SLURM_CLUSTER_NAME SLURM_RESTART_COUNT SLURM_JOB_START_TIME SLURM_JOB_END_TIME
    SLURM_STEP_ID SLURM_STEPID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_MIN
    SLURM_ARRAY_TASK_MAX SLURM_ARRAY_TASK_STEP SLURM_SUBMIT_DIR SLURM_SUBMIT_HOST SLURM_HET_SIZE
    SLURM_NNODES SLURM_JOB_NUM_NODES SLURM_STEP_NUM_NODES SLURM_NODELIST SLURM_JOB_NODELIST SLURM_STEP_NODELIST
    SLURM_NODEID SLURMD_NODENAME SLURM_LAUNCH_NODE_IPADDR SLURM_SRUN_COMM_HOST SLURM_SRUN_COMM_PORT
    SLURM_STEP_LAUNCHER_PORT SLURM_STEP_RESV_PORTS SLURM_TOPOLOGY_ADDR SLURM_TOPOLOGY_ADDR_PATTERN
    SLURM_NTASKS SLURM_NPROCS SLURM_STEP_NUM_TASKS SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_GPU SLURM_TASKS_PER_NODE
    SLURM_STEP_TASKS_PER_NODE SLURM_PROCID SLURM_LOCALID SLURM_GTIDS SLURM_DISTRIBUTION
    SLURM_CPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_CPUS_ON_NODE SLURM_JOB_CPUS_PER_NODE SLURM_THREADS_PER_CORE
    SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU
    SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_GPU_BIND
    SLURM_JOB_GPUS SLURM_STEP_GPUS
"""
_PASSED = frozenset(_NAMES.split())
"""What frameworks need of the launcher's own variables. A launcher has secrets, too (``SLURM_JWT``, what plugins of its
site set), so that each is named."""
_PASSED_PREFIX = "NCCL_"
"""Settings of a library, a hundred of them, and those of its plugins. One with the name of a secret stays out."""


def _passed(name: str) -> bool:
    """Whether the job gets the variable ``name`` of this process; nothing else of the host's environment gets in."""
    if name.startswith(_PASSED_PREFIX):
        return emit.redact(name, name) == name
    return re.sub(r"_HET_GROUP_[0-9]+$", "", name) in _PASSED  # Slurm has one for each group of a job of several kinds


class Container:
    """Runs commands of ``job`` in ``rootfs`` (on this host) with the job's mounts, variables and event emitters."""

    def __init__(
        self,
        job: Job,
        rootfs: Path,
        config: ImageConfig,
        events: Path,
        identity: dict[str, str],
        devices: Selection | None,
    ) -> None:
        self.job, self.rootfs, self.config, self._devices = job, rootfs, config, devices
        for name in job.job.pass_:
            if not name.endswith("*") and name not in os.environ and name not in job.job.env:
                log.warning("the job is to get %s, which is not set here", name)
        passed = {name: value for name, value in os.environ.items() if _passed(name) or job.passes(name)}
        self._environ = {**passed, **job.job.env, **identity, "BOOTSEER_EVENTS": f"{EVENTS_DIR}/{events.name}"}
        # the emitters travel as files: the image needs nothing of bootseer, any Python 3.8 can import them
        python = self._environ.get("PYTHONPATH") or (config.config or ContainerConfig()).variables.get("PYTHONPATH")
        self._environ["PYTHONPATH"] = f"{python}:{PYTHON_DIR}" if python else PYTHON_DIR
        package = Path(bootseer.__file__).resolve().parent  # a pin refuses links on the way
        self._mounts = [
            *(Bind(mount.source, mount.target, mount.readonly) for mount in job.mounts),
            Bind(str(events.parent), EVENTS_DIR),
            Bind(str(package), f"{PYTHON_DIR}/bootseer", readonly=True),
        ]

    def add_mount(self, source: Path, target: str, *, readonly: bool = True) -> None:
        """Show the host folder ``source`` at ``target`` in every command started from now on."""
        self._mounts.append(Bind(str(source), target, readonly=readonly))

    def tell(self, variables: Mapping[str, str]) -> None:
        """Give every command started from now on these variables, too."""
        self._environ.update(variables)

    @property
    def variables(self) -> dict[str, str]:
        """Those of its commands."""
        return (self.config.config or ContainerConfig()).variables | self._environ

    @property
    def noted(self) -> dict[str, str]:
        """Of these those whose values may be on record."""
        return {name: value for name, value in self.variables.items() if not self.job.passes(name)}

    @property
    def owner(self) -> tuple[int, int]:
        """The user and group of this host that its commands are. Raises `ConfigError`."""
        if os.geteuid():
            return os.geteuid(), os.getegid()
        found = user_of(self.rootfs, (self.config.config or ContainerConfig()).user)
        return found["uid"], found["gid"]

    def keep(self, targets: Sequence[str], folder: Path) -> None:
        """Show a folder below ``folder`` at each of the ``targets`` that lies in the image. Raises `ConfigError` for
        one with files of the image in it, which the folder would hide."""
        for number, target in enumerate(targets):
            inside, within = self.placed(target)
            if within != str(self.rootfs):
                continue
            if inside.is_dir() and any(inside.iterdir()):
                raise ConfigError(
                    f"the image has files in {target}: without root a set-up command cannot add to them",
                    hint="have it fill a folder of its own, and name that in [env] targets",
                )
            source = folder / str(number)
            source.mkdir(parents=True)
            self._mounts.append(Bind(str(source), target))

    def placed(self, path: str) -> tuple[Path, str]:
        """Where the container path ``path`` lies on this host, and the folder there that it lies in: a mount's source,
        below which links are not looked at, or the root file system, whose links are followed."""
        clean = posixpath.normpath(path)
        for mount in sorted(self._mounts, key=lambda m: len(m.target), reverse=True):
            if clean == mount.target or clean.startswith(mount.target.rstrip("/") + "/"):
                return Path(mount.source + clean[len(mount.target.rstrip("/")) :]), mount.source
        return env.resolve_in(self.rootfs, clean), str(self.rootfs)

    def target(self, path: str) -> env.Target:
        """The folder ``path`` as a target of a set-up command."""
        host, within = self.placed(path)
        return env.Target(path, str(host), within)

    @property
    def shown(self) -> tuple[tuple[str, str], ...]:
        """(path on this host, where processes in the container see it, links followed) of the job's own mounts: what
        is shown beside them lies in folders of one start."""
        return tuple((mount.source, self._inside(mount.target)) for mount in self.job.mounts)

    def _inside(self, path: str) -> str:
        """``path`` without links of the image in it."""
        return "/" + os.path.relpath(env.resolve_in(self.rootfs, path), self.rootfs)

    def run(
        self,
        argv: Sequence[str],
        *,
        span: str = "",
        auto: bool = False,
        more: Mapping[str, str] | None = None,
        folders: Sequence[Bind] = (),
    ) -> int:
        """Run ``argv`` to its end and return its exit code; ``span`` becomes the parent of what it emits. It alone gets
        the variables ``more`` and sees ``folders``. ``auto``: its Python programs record their own start
        (`bootseer.profile.auto`)."""
        hooks = variables(self._environ["PYTHONPATH"], f"{PYTHON_DIR}/bootseer") if auto else {}
        environ, mounts = {**self._environ, **(more or {}), **hooks, **emit.child_env(span)}, [*self._mounts, *folders]
        cwd, grace = self.job.job.cwd, self.job.job.stop_grace or None
        if os.geteuid():
            binds = [mount._replace(target=self._inside(mount.target)) for mount in mounts]
            return user.run(self.rootfs, self.config, argv, env=environ, mounts=binds, cwd=cwd, stop_grace=grace)
        return image.runtime.run(
            self.rootfs,
            self.config,
            argv,
            env=environ,
            mounts=mounts,
            cwd=cwd,
            devices=self._devices,
            stop_grace=grace,
        )
