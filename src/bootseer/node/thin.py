"""The thin client of root's errands: it loads next to nothing, which is the point of it (see `errand`)."""

from __future__ import annotations

import os
import sys

import bootseer

_SECONDS, _ALIVE_SECONDS = 200.0, 2.0
"""For the errand; for an answer that only says that the daemon is alive."""
_SEQPACKET, _PEERCRED = 5, 17


def stamp() -> bytes:
    """Names the interpreter and the files of bootseer: others, or another version of them, have another one."""
    folder = os.path.dirname(os.path.abspath(bootseer.__file__))
    found = os.stat(folder)
    state = (bootseer.__version__, os.path.realpath(sys.executable), folder, found.st_ino, found.st_ctime_ns)
    return repr(state).encode()


def done(words: list[str]) -> bool:
    """Whether the node daemon did what the command line ``words`` of this process asks for, as root. False: it is to
    be done here; nothing was changed or printed then."""
    if os.geteuid():
        return False
    text = [stamp(), b"%d" % _umask(), b"%d" % len(words), *map(os.fsencode, words)]
    text += [name + b"=" + value for name, value in os.environb.items()]
    try:
        if not _answer(b'{"do":"mounts","version":1,"id":"~"}', _ALIVE_SECONDS):  # of which there are none
            return False
        file = os.memfd_create("errand", os.MFD_CLOEXEC)
        os.write(file, b"".join(one + b"\0" for one in text))
        return _answer(b'{"do":"errand","version":1}', _SECONDS, file) == b"{}"
    except OSError:
        return False


def _answer(packet: bytes, seconds: float, *files: int) -> bytes:
    """Of the daemon; nothing when it is not root's. Raises `OSError`, also after so many ``seconds``."""
    import _socket

    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, file.to_bytes(4, sys.byteorder)) for file in files]
    sock = _socket.socket(_socket.AF_UNIX, _SEQPACKET)
    try:
        sock.settimeout(seconds)
        sock.connect(_socket_path())
        if sock.getsockopt(_socket.SOL_SOCKET, _PEERCRED, 12)[4:8] != bytes(4):
            return b""
        sock.sendmsg([packet], rights)
        return bytes(sock.recv(4096))
    finally:
        sock.close()


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _socket_path() -> str:
    """As the settings say, as far as one line tells it: where no socket is, all is done here."""
    folder = os.environ.get("BOOTSEER_NODE_DIR", "")
    if not folder:
        folder, file = "/run/bootseer-node", os.environ.get("BOOTSEER_CONFIG") or "/etc/bootseer.toml"
        if os.path.exists(file):
            with open(file, encoding="utf-8", errors="replace") as lines:
                for name, _, value in (line.partition("=") for line in lines):
                    folder = value.partition("#")[0].strip(" \t\n\"'") if name.strip() == "node_dir" else folder
    return os.path.abspath(folder) + "/node.sock"
