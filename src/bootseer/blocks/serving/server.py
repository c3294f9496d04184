"""The block server: the program that serves one lazy tree on a node, as a holder, a fetcher and a front.

Started by ``tree.mount`` as ``python -m bootseer.blocks.serving.server STATE_FOLDER ANSWER_FD`` with its spec in
``STATE_FOLDER/spec.json``, or beforehand as ``... server - ANSWER_FD STORE_URL``, see `standby`. It answers ``ok PID
DRIVER`` when the tree may be mounted, or ``error CODE TEXT``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bootseer.blocks.serving import starting
from bootseer.blocks.serving.sparing import Sparing
from bootseer.errors import BootseerError
from bootseer.store import Store, open_store

log = logging.getLogger(__name__)


def main(argv: list[str], *, store_for: Callable[[str], Store] = open_store) -> int:
    """Serve until the end. The first process returns at once: the server is nobody's child to wait for.

    ``argv``: the folder with the spec, and the descriptor to answer on; or ``-``, the descriptor and a store's URL:
    wait for the folder on standard input. ``store_for`` opens the store; benchmarks pass one that wraps it with a rate
    limit.
    """
    answer_fd = int(argv[1])
    if os.fork():
        return 0
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(Sparing())

    def answer(text: str) -> None:
        nonlocal answer_fd
        if answer_fd >= 0:
            if text:
                os.write(answer_fd, text.encode())
            os.close(answer_fd)
            answer_fd = -1

    try:
        if argv[0] == "-":
            return starting.serve(answer, store_for, None, argv[2])
        return starting.serve(answer, store_for, Path(argv[0]))
    except BootseerError as exc:
        log.error("%s", exc)
        answer(f"error {exc.exit_code} {exc}\n")
        return exc.exit_code
    except Exception as exc:
        log.exception("the block server failed")
        answer(f"error 70 {exc!r}\n")
        return 70


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
