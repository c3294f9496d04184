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
    PrivilegeError,
    UnavailableError,
    UnsupportedError,
)

REACH = "check that the NameNode and the DataNodes run and are reachable from here"
ANOTHER_TOKEN = "fetch another token (hdfs fetchdt), or unset HADOOP_TOKEN_FILE_LOCATION and kinit"
_RPC = re.compile(r'^(?:Fatal)?RPCError\("(?P<java>[\w.$]+)", "(?P<text>.*?)(?:"\))?$', re.DOTALL)

# First match wins. (pattern, class, hint); searched in the names of the exception's classes, and where these say
# nothing (`_VAGUE`) in its text. Names of files are cut out of that first: a file may well be called SafeMode.
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
        "check the owner and mode, or set HADOOP_USER_NAME (with Kerberos: kinit as another user)",
    ),
    (r"LeaseExpired", NotWritableError, "the file was removed, finished or taken over by another writer"),
    (
        r"(ParentNot|PathIsNotEmpty|IsA|NotA)Directory|directory is not empty|both be directories",
        NotWritableError,
        "another name is in the way",
    ),
    (
        r"InvalidToken",
        PrivilegeError,
        ANOTHER_TOKEN,
    ),
    (r"SaslException", PrivilegeError, "see klist; is the clock of this machine right?"),
    (r"FileNotFound", NotFoundError, ""),
    (r"[Cc]hecksum", DataError, "every replica that answered is damaged; run hdfs fsck on the file"),
    (r"NoSuchProtocol|Unknown protocol", ConfigError, "this port is not the NameNode's RPC port"),
    (r"UnresolvedPath|UnresolvedLink", UnsupportedError, "symbolic links in HDFS are not followed"),
    (r"CryptoProtocol|NoSuchMethod|VersionMismatch", UnsupportedError, ""),
    (r"ErasureCoding|UnsupportedFeature|SASL|Unsupported", UnsupportedError, ""),
    (r"UrlParse|InvalidArgument|InvalidPath|PathComponentTooLong", ConfigError, ""),
    (r"OSError|Connection|Timeout|DataTransfer|BlocksNotFound|NoAvailable|IOError", UnavailableError, REACH),
)
_VAGUE = {"", "IOException", "RemoteException", "RetriableException", "IOError", "OperationFailed", "DataTransferError"}
_NAMES = re.compile(r"""(?:\bhdfs:/)?/[^\s"',;]*|"[^"]*"|'[^']*'""")
_PASSING = re.compile(r"SafeModeException|StandbyException|RetriableException|ObserverRetryOnActive|NotReplicatedYet")


_PROXY = "unset HADOOP_PROXY_USER, or have the site allow it (hadoop.proxyuser)"
_REFUSED = (
    ("is not allowed to impersonate", _PROXY),
    ("Unauthorized connection for super-user", _PROXY),
    ("is not authorized for protocol", "have the site allow it (security.client.protocol.acl in hadoop-policy.xml)"),
)


class RemoteError(Exception):
    """An exception that the server answered with: its Java class and the first line of its text. ``fatal``: the server
    closes the connection. The cause (``__cause__``) of what `remote` makes of it."""

    def __init__(self, java: str, text: str, *, fatal: bool = False) -> None:
        self.java = " ".join(java.split()).rpartition(".")[2].rpartition("$")[2]
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


class SaslRequired(Exception):
    """The NameNode wants a login first."""


def remote(exc: RemoteError, doing: str) -> BootseerError | FileExistsError:
    """One line for a server's exception met while ``doing`` (a phrase such as ``"read /a on hdfs://n:8020"``)."""
    if exc.java in ("FileAlreadyExistsException", "AlreadyBeingCreatedException"):
        return FileExistsError(f"cannot {doing}: {exc}")
    for said, hint in _REFUSED:
        if said in exc.text:
            return NotWritableError(f"cannot {doing}: {exc.text}", hint=hint)
    return _classify(exc.java, exc.java, exc.text, doing)


def is_below_a_file(exc: BootseerError) -> bool:
    """Whether a NameNode refused a path because a part of it is a file. It tells ordinary users so as a denial."""
    said = exc.message if isinstance(exc, NotWritableError) else ""
    return said.endswith("(is not a directory)") or ": ParentNotDirectoryException " in said


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
    return _classify(f"{kinds} {java}", java, text, doing)


def _classify(kinds: str, java: str, text: str, doing: str) -> BootseerError:
    said = " ".join(filter(None, (java, text)))
    if (found := _kind(kinds, java, text, doing)) is None:
        return BootseerError(f"cannot {doing}: {said}")
    _, error, hint = found
    if error is NotFoundError:
        said = "it is a folder" if text.startswith("Path is not a file") else "no such file or folder"
    return error(f"cannot {doing}: {said}", hint=hint)


def _kind(kinds: str, java: str, text: str, doing: str) -> tuple[str, type[BootseerError], str] | None:
    *special, general = _KINDS
    named = next((kind for kind in special if re.search(kind[0], kinds)), None)
    if java in _VAGUE and (named is None or java == "RetriableException"):  # that one wraps what it is about
        bare = _NAMES.sub(" ", _without_paths(text, doing))
        named = next((kind for kind in special if re.search(kind[0], bare)), named)
    return named or (general if re.search(general[0], f"{kinds} {text if java in _VAGUE else ''}") else None)


def _without_paths(text: str, doing: str) -> str:
    """``text`` without the paths that ``doing`` speaks of: they may have blanks, which `_NAMES` stops at."""
    known = re.search(r"/.*?(?= on hdfs://|$)", doing)
    for path in known[0].split(" to ") if known else ():
        for name in (path, path.rpartition("/")[0], path.rpartition("/")[2]):
            if name.strip("/ "):
                text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", " ", text)
    return text
