"""What ``hdfs-native`` raises, in this project's classes.

It raises ``OSError`` and its subclasses where it has a matching one, else ``RuntimeError`` with the debug text of its
own error; texts of the NameNode carry a Java stack trace.
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

_REACH = "check that the NameNode and the DataNodes run and are reachable from here"
_RPC = re.compile(r'^RPCError\("(?P<java>[\w.$]+)", "(?P<text>.*)', re.DOTALL)

# First match wins. (pattern, class, hint); searched in "<exception class> <java class> <text>".
_KINDS: tuple[tuple[str, type[BootseerError], str], ...] = (
    (r"QuotaExceeded|DiskOutOfSpace|out of space|No space left", FullError, "free some space there or raise the quota"),
    (r"SafeMode", UnavailableError, "the NameNode is in safe mode; wait until it has seen its DataNodes"),
    (r"Standby|RetriableException", UnavailableError, "no active NameNode; check its high-availability pair"),
    (r"could only be written to|minReplication", UnavailableError, "too few DataNodes are alive or have free space"),
    (r"AccessControl|PermissionError", NotWritableError, "check the owner and mode, or set HADOOP_USER_NAME"),
    (
        r"ParentNotDirectory|PathIsNotEmptyDirectory|IsADirectory|NotADirectory|both be directories",
        NotWritableError,
        "another name is in the way",
    ),
    (r"FileNotFound", NotFoundError, ""),
    (r"[Cc]hecksum", DataError, "every replica that answered is damaged; run hdfs fsck on the file"),
    (r"ErasureCoding|UnsupportedFeature|SASL|Unsupported", UnsupportedError, ""),
    (r"UrlParse|InvalidArgument|InvalidPath", ConfigError, ""),
    (r"OSError|Connection|Timeout|DataTransfer|BlocksNotFound|NoAvailable|IOError", UnavailableError, _REACH),
)


def translate(exc: Exception, doing: str) -> BootseerError:
    """One line for an exception met while ``doing`` (a phrase such as ``"read /a on hdfs://n:8020"``)."""
    text, java = str(exc), ""
    if found := _RPC.match(text):
        java, text = found["java"].rsplit(".", 1)[-1], found["text"]
    # what follows is a Java stack trace, or the debug text of a list of DataNodes
    text = re.split(r"\n|\\n|\\t|\t|: \[Datanode", text, maxsplit=1)[0].strip().rstrip('."')
    if shortened := re.match(r'^(\w+)\("(.*)$', text):
        java, text = shortened[1], shortened[2].rstrip('")')
    kinds = " ".join(kind.__name__ for kind in type(exc).__mro__)
    subject = f"{kinds} {java} {text}"
    for pattern, error, hint in _KINDS:
        if re.search(pattern, subject):
            if error is NotFoundError and text.startswith("Path is not a file"):
                return NotFoundError(f"cannot {doing}: it is a folder")
            shown = "no such file or folder" if error is NotFoundError else " ".join(filter(None, (java, text)))
            return error(f"cannot {doing}: {shown}", hint=hint)
    return BootseerError(f"cannot {doing}: {' '.join(filter(None, (java, text)))}")
