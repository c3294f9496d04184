"""Removing the stripes of a file that is gone, unless another file may name them."""

from __future__ import annotations

import logging

from bootseer.backends.interface import Backend, Entry, join
from bootseer.backends.pool import parallel
from bootseer.errors import DataError, NotFoundError
from bootseer.stripefs import layout
from bootseer.stripefs.files.reader import read_pointer
from bootseer.stripefs.layout import Pointer

_log = logging.getLogger(__name__)


def remove_stripes(backend: Backend, path: str, pointer: Pointer, *, replaced: bool = False) -> bool:
    """Remove the stripes of the file that had ``pointer`` at ``path``, which is not there any more.

    ``replaced``: by a rename, just before which another process may have given it another name.
    They stay while another file of the folder names them (it is the file under a new name, or one of the two is a copy
    of the pointer), or a damaged pointer may. The folder is looked through when they were ``replaced``, or written
    under another name. False when only a damaged pointer is in the way: the temporary file that calls them garbage is
    to stay then, too.
    """
    parent, _, name = path.rpartition("/")

    def names_them(entry: Entry) -> bool | None:
        try:
            found = read_pointer(backend, join(parent, entry.name))
        except NotFoundError:
            return False
        except DataError:
            return None
        return found is not None and found.uuid == pointer.uuid

    if replaced or pointer.name != name:
        # one that was renamed just now is as it was
        size = len(layout.encode_pointer(pointer)) if pointer.name == name else None
        others = [
            entry
            for entry in backend.list(parent)
            if not entry.is_dir and entry.size <= layout.MAX_TEXT and not entry.name.startswith(layout.TEMPORARY)
            if size is None or entry.size == size
        ]
        found = parallel(names_them, others)
        if True in found or None in found:
            _log.warning("the stripes of %s are left in place: another file may name them", path)
            return True in found
    for index in range(pointer.width):
        backend.delete(pointer.stripe_path(path, index))
    return True
