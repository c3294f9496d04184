"""What NameNodes answer and what ``hdfs-native`` raises, in this project's classes.

``hdfs-native`` raises ``OSError`` and its subclasses where it has a matching one, else ``RuntimeError`` with the debug
text of its own error; texts of the NameNode carry a Java stack trace.
"""

from __future__ import annotations

import re

from bootseer.errors import (
    BootseerError,
    ConfigError,
    DataError,
    FullError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
)

REACH = "check that the NameNode and the DataNodes run and are reachable from here"
_RPC = re.compile(r'^RPCError\("(?P<java>[\w.$]+)", "(?P<text>.*)', re.DOTALL)

# First match wins. (pattern, class, hint); searched in "<exception class> <java class> <text>".
_KINDS: tuple[tuple[str, type[BootseerError], str], ...] = (
    (r"QuotaExceeded|DiskOutOfSpace|out of space|No space left", FullError, "free some space there or raise the quota"),
    (r"SafeMode", UnavailableError, "the NameNode is in safe mode; wait until it has seen its DataNodes"),
    (
        r"Standby|RetriableException|ObserverRetry",
        UnavailableError,
        "no active NameNode; check its high-availability pair",
    ),
    (r"could only be written to|minReplication", UnavailableError, "too few DataNodes are alive or have free space"),
    (r"RecoveryInProgress|NotReplicatedYet", UnavailableError, "HDFS is still finishing an earlier write; try again"),
    (
        r"AccessControl|Authorization|PermissionError",
        NotWritableError,
        "check the owner and mode, or set HADOOP_USER_NAME",
    ),
    (r"LeaseExpired", NotWritableError, "the file was removed, finished or taken over by another writer"),
    (
        r"(ParentNot|PathIsNotEmpty|IsA|NotA)Directory|directory is not empty|both be directories",
        NotWritableError,
        "another name is in the way",
    ),
    (r"FileNotFound", NotFoundError, ""),
    (r"[Cc]hecksum", DataError, "every replica that answered is damaged; run hdfs fsck on the file"),
    (r"NoSuchProtocol|Unknown protocol", ConfigError, "this port is not the NameNode's RPC port"),
    (r"UnresolvedPath|UnresolvedLink", UnsupportedError, "symbolic links in HDFS are not followed"),
    (r"CryptoProtocol|NoSuchMethod|VersionMismatch", UnsupportedError, ""),
    (r"ErasureCoding|UnsupportedFeature|SASL|Unsupported", UnsupportedError, ""),
    (r"UrlParse|InvalidArgument|InvalidPath|PathComponentTooLong", ConfigError, ""),
    (r"OSError|Connection|Timeout|DataTransfer|BlocksNotFound|NoAvailable|IOError", UnavailableError, REACH),
)
_PASSING = re.compile(r"SafeModeException|StandbyException|RetriableException|ObserverRetryOnActive|NotReplicatedYet")


class RemoteError(Exception):
    """An exception that the server answered with: its Java class and the first line of its text.

    ``fatal``: the server closes the connection. The cause (``__cause__``) of what `remote` makes of it.
    """

    def __init__(self, java: str, text: str, *, fatal: bool = False) -> None:
        self.java = java.rpartition(".")[2].rpartition("$")[2]
        self.text = (text.strip().splitlines() or [""])[0]
        self.fatal = fatal
        super().__init__(" ".join(filter(None, (self.java, self.text))))

    @property
    def passing(self) -> bool:
        """The server asks to be asked again: it starts, is in safe mode, is no longer or not yet the active one."""
        return bool(_PASSING.search(self.java))

    @property
    def elsewhere(self) -> bool:
        """Another NameNode of the name service may do what this one does not."""
        return bool(re.search("Standby|Retriable|ObserverRetry", self.java))


class SaslRequired(UnsupportedError):
    """The NameNode wants authentication; ``mechanisms`` are those it offers."""

    def __init__(self, mechanisms: str) -> None:
        super().__init__(f"the NameNode wants authentication ({mechanisms})", hint="use hdfs_access = native")
        self.mechanisms = mechanisms


def remote(exc: RemoteError, doing: str) -> BootseerError | FileExistsError:
    """One line for a server's exception met while ``doing`` (a phrase such as ``"read /a on hdfs://n:8020"``)."""
    if exc.java in ("FileAlreadyExistsException", "AlreadyBeingCreatedException"):
        return FileExistsError(f"cannot {doing}: {exc.text}")
    return _classify(f"{exc.java} {exc.text}", exc.java, exc.text, doing)


def translate(exc: Exception, doing: str) -> BootseerError:
    """One line for an exception of ``hdfs-native`` met while ``doing``."""
    text, java = str(exc), ""
    if found := _RPC.match(text):
        java, text = found["java"].rsplit(".", 1)[-1], found["text"]
    # what follows is a Java stack trace, or the debug text of a list of DataNodes
    text = re.split(r"\n|\\n|\\t|\t|: \[Datanode", text, maxsplit=1)[0].strip().rstrip('."')
    if shortened := re.match(r'^(\w+)\("(.*)$', text):
        java, text = shortened[1], shortened[2].rstrip('")')
    kinds = " ".join(kind.__name__ for kind in type(exc).__mro__)
    return _classify(f"{kinds} {java} {text}", java, text, doing)


def _classify(subject: str, java: str, text: str, doing: str) -> BootseerError:
    for pattern, error, hint in _KINDS:
        if re.search(pattern, subject):
            if error is NotFoundError and text.startswith("Path is not a file"):
                return NotFoundError(f"cannot {doing}: it is a folder")
            shown = "no such file or folder" if error is NotFoundError else " ".join(filter(None, (java, text)))
            return error(f"cannot {doing}: {shown}", hint=hint)
    return BootseerError(f"cannot {doing}: {' '.join(filter(None, (java, text)))}")
