"""What a NameNode says over HTTP: its counters, where blocks are, and some things only an administrator asks for.

Tests use it as a witness that shares no code with `bootseer.hdfs`. WebHDFS is Hadoop's own documented interface;
``GET_BLOCK_LOCATIONS`` is the part of it that Hadoop's own client uses to learn block ids.
"""

from __future__ import annotations

import getpass
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

from bootseer.errors import BootseerError, UnavailableError

_DEADLINE = 30.0  # the first operation loads many classes: on a busy machine that took more than 5 s


class Holder(NamedTuple):
    """A DataNode that has a replica: its id, and where it listens."""

    uuid: str
    address: str
    hostname: str
    transfer_port: int
    info_port: int
    ipc_port: int


class BlockAt(NamedTuple):
    """A block of a file: identity, place and length in bytes, and its holders in the order the NameNode tells them."""

    pool: str
    id: int
    generation: int
    offset: int
    length: int
    holders: tuple[Holder, ...]
    corrupt: bool


class WebHdfs:
    """The NameNode at ``base`` (``http://host:port``). Raises `UnavailableError` while it does not answer."""

    def __init__(self, base: str) -> None:
        self.base = base
        # a proxy of the environment must not see requests to a test's own daemons
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self, url: str, method: str = "GET") -> dict[str, Any]:
        request = urllib.request.Request(f"{self.base}{url}", method=method)
        try:
            with self._opener.open(request, timeout=_DEADLINE) as answer:
                text = answer.read()
        except urllib.error.HTTPError as exc:
            detail = exc.read(2000).decode(errors="replace")
            raise BootseerError(f"the NameNode refused {method} {url}: {exc.code} {detail}") from None
        except OSError as exc:
            raise UnavailableError(f"the NameNode's web server did not answer: {exc}") from None
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    def _operate(self, op: str, path: str = "/", *, method: str = "GET", **values: str | int) -> dict[str, Any]:
        query = urllib.parse.urlencode({"op": op, "user.name": getpass.getuser(), **values})
        return self._ask(f"/webhdfs/v1{urllib.parse.quote(path)}?{query}", method)

    def bean(self, name: str) -> dict[str, Any]:
        """The counters that the NameNode keeps under ``name``; empty while it starts."""
        beans = self._ask(f"/jmx?qry=Hadoop:service=NameNode,name={name}")["beans"]
        return dict(beans[0]) if beans else {}

    def live_datanodes(self) -> int:
        """How many DataNodes it counts as alive and in service."""
        return int(self.bean("FSNamesystemState").get("NumLiveDataNodes", 0))

    def datanodes_with_room(self) -> int:
        """How many DataNodes have told how much room they have. One that has only registered gets no blocks yet."""
        live = json.loads(self.bean("NameNodeInfo").get("LiveNodes", "{}"))
        return sum(node["capacity"] > 0 for node in live.values())

    def safe_mode(self) -> bool:
        """Whether it still waits for its DataNodes to report their blocks; then nothing can be written."""
        return bool(self.bean("FSNamesystemState").get("FSState", "safeMode") != "Operational")

    def blocks(self, path: str) -> list[BlockAt]:
        """The blocks of a replicated file, in order."""
        found = self._operate("GET_BLOCK_LOCATIONS", path)["LocatedBlocks"]
        return [_block(block) for block in found["locatedBlocks"]]

    def set_replication(self, path: str, replication: int) -> None:
        """Ask for another number of replicas; they are copied or removed later."""
        self._operate("SETREPLICATION", path, method="PUT", replication=replication)

    def change(self, op: str, path: str, **values: str) -> None:
        """``SETPERMISSION`` (``permission="640"``), ``SETOWNER`` (``owner=``, ``group=``), ``SETQUOTA`` and their like:
        a tenth of a second, where Hadoop's own client starts a JVM."""
        self._operate(op, path, method="PUT", **values)

    def make_erasure_coded(self, folder: str, policy: str) -> None:
        """Make ``folder``; files written to it from now on are erasure coded. Needs enough DataNodes (RS-3-2: 5)."""
        self._operate("MKDIRS", folder, method="PUT")
        self._operate("ENABLEECPOLICY", method="PUT", ecpolicy=policy)
        self._operate("SETECPOLICY", folder, method="PUT", ecpolicy=policy)


def _block(found: dict[str, Any]) -> BlockAt:
    block = found["block"]
    holders = tuple(
        Holder(
            str(node["storageID"]),
            str(node["ipAddr"]),
            str(node["hostName"]),
            int(node["xferPort"]),
            int(node["infoPort"]),
            int(node["ipcPort"]),
        )
        for node in found["locations"]
    )
    return BlockAt(
        str(block["blockPoolId"]),
        int(block["blockId"]),
        int(block["generationStamp"]),
        int(found["startOffset"]),
        int(block["numBytes"]),
        holders,
        bool(found["isCorrupt"]),
    )
