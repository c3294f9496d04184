"""Messages between FUSE server and fetcher of a block server.

The channel outlives both. Every message may therefore come twice or not at all: a fetcher that starts says `Repeat`,
and the FUSE server repeats what it still wants.
"""

from __future__ import annotations

import msgspec

from bootseer.kernel import channel

_GENERATION_SHIFT = 40


class Wanted(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """FUSE server to fetcher: blocks ``first`` to ``last`` (inclusive) are needed by thread ``pid``."""

    id: int
    first: int
    last: int
    pid: int


class Came(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Fetcher to FUSE server: the blocks of request ``id`` are ready (``errno`` 0), or failed.

    A descriptor may come along: a memfd with the bytes of all blocks of the request, from the first one's first byte
    on, because some could not be cached; they are not ready.
    """

    id: int
    errno: int = 0


class Repeat(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Fetcher to FUSE server: I have just started, repeat what you still want."""


class Finish(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Supervisor to fetcher: the last mount is gone: finish, and end."""


Message = Wanted | Came | Repeat | Finish


def request_id(generation: int, number: int) -> int:
    """An id that no other FUSE server of this tree uses: ``number`` counts from 0 in each."""
    return generation << _GENERATION_SHIFT | number


class Channel(channel.Channel[Message]):
    """One end; of a pair, the fetcher's is the second."""

    message = Message
