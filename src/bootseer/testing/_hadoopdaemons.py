"""The JVMs of one running HDFS, and what may happen to them: frozen, killed, started again."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping

from bootseer.errors import UnavailableError
from bootseer.testing._hadoopsite import Site
from bootseer.testing._jvm import Daemon
from bootseer.testing.webhdfs import WebHdfs

_INCOMPLETE = ("UnderReplicatedBlocks", "PendingReplicationBlocks", "CorruptBlocks")


class Daemons:
    """One NameNode and its DataNodes, which are numbered from 0. ``web``: the NameNode over HTTP.

    ``addresses``: ``host:port`` of each DataNode's data transfers.
    """

    namenode: Daemon
    datanodes: list[Daemon]
    addresses: list[str]
    web: WebHdfs
    _later: set[int]
    _site: Site
    _namenode_settings: dict[str, str]

    def live_datanodes(self) -> int:
        """How many DataNodes the NameNode counts as alive and in service.

        Raises `UnavailableError` while it does not answer.
        """
        return self.web.live_datanodes()

    def wait_live(self, count: int, *, deadline: float = 60.0) -> None:
        """Wait until exactly ``count`` DataNodes are alive in the NameNode's eyes."""
        until = time.monotonic() + deadline
        live = -1
        while time.monotonic() < until:
            with contextlib.suppress(UnavailableError):
                if (live := self.live_datanodes()) == count:
                    return
            time.sleep(0.2)
        raise UnavailableError(f"{live} DataNodes are alive after {deadline:.0f} s, not {count}")

    def wait_whole(self, *, deadline: float = 60.0) -> None:
        """Wait until every block of a finished file has its replicas, and none is known to be damaged.

        What comes before a second fault: HDFS copies in its own time what the first one took.
        """
        until = time.monotonic() + deadline
        missing: dict[str, object] = {}
        while time.monotonic() < until:
            with contextlib.suppress(UnavailableError):
                state = self.web.bean("FSNamesystem")
                missing = {name: state.get(name) for name in _INCOMPLETE if state.get(name, 1)}
                if not missing:
                    return
            time.sleep(0.1)
        raise UnavailableError(f"HDFS is not whole after {deadline:.0f} s: {missing or 'no answer'}")

    def index_of(self, address: str) -> int:
        """Which DataNode listens at ``address`` (``host:port`` of its data transfers)."""
        return self.addresses.index(address)

    def pause(self, index: int) -> None:
        """Freeze DataNode ``index``: it keeps its connections and answers nothing."""
        self.datanodes[index].signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        self.datanodes[index].signal(signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self, *indices: int) -> Iterator[None]:
        """These DataNodes answer nothing inside; afterwards all are alive in the NameNode's eyes again."""
        try:
            for index in indices:
                self.pause(index)
            yield
        finally:
            for index in indices:
                self.resume(index)
            self.wait_live(sum(daemon.alive() for daemon in self.datanodes))

    def kill(self, index: int) -> None:
        self.datanodes[index].kill()

    def restart(self, index: int, *, deadline: float = 60.0) -> None:
        """Kill DataNode ``index``, start it on the same data and port, wait until it has reported its blocks."""
        daemon = self.datanodes[index]
        daemon.kill()
        self._later.discard(index)
        seen = daemon.log.stat().st_size if daemon.log.exists() else 0
        daemon.start()
        until = time.monotonic() + deadline
        # the NameNode's count says nothing: it takes 14 s to see that a DataNode is gone
        while b"Successfully sent block report" not in daemon.log.read_bytes()[seen:]:
            if time.monotonic() >= until or not daemon.alive():
                raise UnavailableError(f"{daemon.name} did not come back: {daemon.last_line()}")
            time.sleep(0.1)

    @contextlib.contextmanager
    def frozen_namenode(self) -> Iterator[None]:
        """The NameNode keeps its connections and answers nothing inside; afterwards it knows its DataNodes again."""
        self.namenode.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.namenode.signal(signal.SIGCONT)
            self.wait_live(sum(daemon.alive() for daemon in self.datanodes))

    def kill_namenode(self) -> None:
        self.namenode.kill()

    def restart_namenode(self, *, settings: Mapping[str, str] | None = None, deadline: float = 60.0) -> None:
        """Kill the NameNode, start it at the same port, wait until its DataNodes have reported and it takes writes.

        ``settings``: more properties for the NameNode alone, such as another ``dfs.replication``.
        """
        self.namenode.kill()
        if settings:
            self._namenode_settings = {**self._namenode_settings, **settings}
            self._site.configure("namenode", self._namenode_settings)
        self.namenode.start()
        until = time.monotonic() + deadline
        running = sum(daemon.alive() for daemon in self.datanodes)
        while time.monotonic() < until and self.namenode.alive():
            with contextlib.suppress(UnavailableError):
                # alive is who has registered; room on it is known, and blocks go there, since its first heartbeat
                if self.web.datanodes_with_room() >= running and not self.web.safe_mode():
                    return
            time.sleep(0.1)
        raise UnavailableError(f"the NameNode did not come back: {self.namenode.last_line()}")
