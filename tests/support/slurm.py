"""A real Slurm cluster on one machine: a head and compute nodes, each a machine of its own by its namespaces.

Each has its own network, mounts, host name and processes, so also its own ``/run``, ``/var/spool``, ``/etc/passwd`` and
``/etc/slurm``; the rest of the file system is this host's, as a shared one would be. When process 1 of a node is killed
the kernel ends all its processes and mounts, so nothing stays behind. Needs root and Debian's slurmctld, slurmd,
slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from bootseer.errors import BootseerError
from bootseer.kernel.child import ended
from support.netns import ShapedNetwork
from support.waits import until

WAIT = 120.0
"""Seconds for whatever happens in the cluster: the machine may be busy."""

_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")  # unshare ignores SIGTERM
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

_CONF = """\
ClusterName=bootseer
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={log}/slurmctld.log
SlurmdLogFile={log}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1,sched_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
MessageTimeout=60
KillWait=5
SlurmdTimeout=300
{more}
NodeName=DEFAULT CPUs=2 RealMemory=4000 State=UNKNOWN
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_BOOT = r"""
set -e
etc=$1/etc own=$1/nodes/$2; hostname "$2"; shift 2; cd /
mount --make-rshared /  # as systemd makes them
mkdir -p "$own/spool/slurmd" "$own/spool/slurmctld"; mkdir -p -m 1777 "$own/spool/local"; chmod 1777 "$own/spool/local"
mount -t tmpfs -o mode=755 tmpfs /run; mkdir -m 755 /run/munge
mount --bind "$own/spool" /var/spool
for name in hosts passwd group slurm munge; do mount --bind "$etc/$name" "/etc/$name"; done
munged --force --key-file /etc/munge/key --socket /run/munge/munge.socket.2 --pid-file /run/munge/munged.pid \
    --log-file "$own/munged.log" --seed-file /run/munge/seed --num-threads 2
exec "$@"
"""


class SlurmCluster:
    """Context manager: a head and ``nodes`` nodes ``n1``, ``n2``... whose state is below ``root``, a folder on a disk.

    ``users``: name -> uid. Files that everybody can see lie at `home`; ``/var/spool/local`` is a node's own disk.
    `configure` puts more lines into slurm.conf. Raises `UnavailableError` when the nodes do not become idle.
    """

    def __init__(self, root: Path, *, nodes: int = 4, users: Mapping[str, int]) -> None:
        self.root, self.users = root, users
        number = os.getpid() % 250  # beside others of this machine
        self.network = ShapedNetwork(f"sl{number}", nodes=nodes + 1, subnet=f"10.81.{number}.0/24")
        self.host = self.network.host
        """This host's address, as the nodes see it."""
        self.names = [f"n{i + 1}" for i in range(nodes)]
        self._links = dict(zip(["head", *self.names], self.network.nodes, strict=True))
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> SlurmCluster:
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.network)
            undo.callback(self._stop)
            self._write()
            self._boot("head", "slurmctld", "-D", "-c", "-i")
            log = self.root / "log/slurmctld.log"  # a client that asks before it listens waits for 10 s
            until(lambda: log.exists() and "Running as primary" in log.read_text(), WAIT, "the start of slurmctld")
            for name in self.names:
                self._boot(name, "slurmd", "-D", "-N", name)
            until(self.idle, WAIT, "the start of the nodes", step=0.1)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._undo.close()

    def kill(self, name: str) -> None:
        """A node loses its power. When this returns nothing of it runs any more."""
        first = os.pidfd_open(self._first(name))
        machine = self._machines.pop(name)
        machine.kill()
        machine.wait(WAIT)
        until(lambda: ended(first), WAIT, f"the end of {name}")  # all its other processes have ended before
        os.close(first)
        self.run(
            "head", ["scontrol", "update", f"nodename={name}", "state=down", "reason=dead"]
        )  # it sees it in minutes

    def boot(self) -> None:
        """Boot the nodes that were killed."""
        for name in self.names:
            if name not in self._machines:
                self._boot(name, "slurmd", "-D", "-N", name)
                self.run("head", ["scontrol", "update", f"nodename={name}", "state=resume"])

    def configure(self, *lines: str) -> None:
        """More lines for slurm.conf, which all daemons read again."""
        self._write_conf(lines)
        self.run("head", ["scontrol", "reconfigure"])

    def home(self, user: str) -> Path:
        return self.root / "home" / user

    def argv(self, node: str, argv: Sequence[str], user: str = "root") -> list[str]:
        """``argv`` as it runs on a node, in the user's home."""
        words = ["nsenter", "-t", str(self._first(node)), "-m", "-u", "-n", "-p", f"--wd={self.home(user)}", "--"]
        words += ["env", "-i", f"HOME={self.home(user)}", f"USER={user}", f"PATH={_PATH}"]
        if user != "root":
            words += ["setpriv", f"--reuid={self.users[user]}", f"--regid={self.users[user]}", "--clear-groups"]
        return [*words, *argv]

    def _first(self, node: str) -> int:
        """Process 1 of a node, as this host numbers it."""
        pid = self._machines[node].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def run(self, node: str, argv: Sequence[str], user: str = "root", check: bool = True) -> str:
        """What ``argv`` prints on a node, in both streams. ``check``: raise `BootseerError` when it fails."""
        done = subprocess.run(
            self.argv(node, argv, user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT,
            check=False,
        )
        if check and done.returncode:
            raise BootseerError(f"{argv[0]} on {node} failed: {done.stdout}")
        return done.stdout.strip()

    def submit(self, user: str, *words: str | Path) -> str:
        """``sbatch`` with these words; returns the job's id. The output lies in the user's home, in ``JOBID.out``."""
        return self.run("head", ["sbatch", "--parsable", "--output=%j.out", *map(str, words)], user)

    def output(self, user: str, job: str) -> str:
        path = self.home(user) / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What slurmctld knows of a job, such as ``JobState`` and ``ExitCode``."""
        words = self.run("head", ["scontrol", "-o", "show", "job", job]).split(" ")
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: str) -> dict[str, str]:
        """The job once it has ended, its Epilogs too."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")
        until(lambda: self.job(job)["JobState"] not in running, WAIT, f"the end of job {job}", step=0.2)
        return self.job(job)

    def states(self) -> list[str]:
        return self.run("head", ["sinfo", "-h", "-N", "-o", "%t"], check=False).split()

    def idle(self) -> bool:
        return self.states() == ["idle"] * len(self.names)

    def _write(self) -> None:
        etc = self.root / "etc"
        for folder in (etc / "slurm", etc / "munge", self.root / "log", self.root / "home/root"):
            folder.mkdir(parents=True)
        (etc / "munge").chmod(0o700)
        (etc / "munge/key").write_bytes(secrets.token_bytes(128))
        (etc / "munge/key").chmod(0o600)
        hosts = ["127.0.0.1 localhost", *(f"{link.address} {name}" for name, link in self._links.items())]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")
        for file, form in (("passwd", "{0}:x:{1}:{1}::{2}:/bin/bash"), ("group", "{0}:x:{1}:")):
            new = [form.format(name, uid, self.home(name)) for name, uid in self.users.items()]
            (etc / file).write_text(Path("/etc", file).read_text() + "\n".join(new) + "\n")
        for name, uid in self.users.items():
            self.home(name).mkdir(mode=0o700)
            os.chown(self.home(name), uid, uid)
        self._write_conf(())

    def _write_conf(self, lines: Sequence[str]) -> None:
        nodes = "\n".join(f"NodeName={n} NodeHostname={n} NodeAddr={self._links[n].address}" for n in self.names)
        text = _CONF.format(head=self._links["head"].address, log=self.root / "log", more="\n".join(lines), nodes=nodes)
        (self.root / "etc/slurm/slurm.conf").write_text(text)

    def _boot(self, name: str, *daemon: str) -> None:
        link = self._links[name]
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.root / "log" / f"boot-{name}.log", "ab") as out:
            self._machines[name] = subprocess.Popen(
                [*_WITH_US, *link.argv([*unshare, "bash", "-c", _BOOT, "boot", str(self.root), name, *daemon])],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={"PATH": _PATH},
            )

    def _stop(self) -> None:
        for machine in self._machines.values():
            machine.kill()  # its only child is process 1 of the node, which the kernel kills then
        for machine in self._machines.values():
            machine.wait(WAIT)


def installed() -> bool:
    """Whether the programs are here."""
    return all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch", "munged"))
