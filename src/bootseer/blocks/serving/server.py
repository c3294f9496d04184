"""The block server: the program that serves one lazy tree on a node, as a supervisor, a FUSE server and a fetcher.
`bootseer.served.client` starts it with a `ServerSpec`; it answers with its driver when the tree may be mounted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from bootseer.blocks.serving import supervisor
from bootseer.blocks.serving.protocol import ServerSpec
from bootseer.objects import Store, open_store
from bootseer.served import entry
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)


def main(*, store_for: Callable[[str], Store] = open_store) -> int:
    """Serve until the end. ``store_for`` opens the store, in the fetcher; benchmarks pass one with a rate limit."""

    def serve(begun: entry.Begun) -> int:
        spec = json_as(begun.spec, ServerSpec)
        running = supervisor.start(spec, begun, store_for)
        if not begun.answer.done(running.driver):
            log.warning("nobody waits for tree %s any more", spec.id)
            running.end()
        return running.run()

    return entry.run("bootseer-blocks", serve)


if __name__ == "__main__":
    sys.exit(main())
