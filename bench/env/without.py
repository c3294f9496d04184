"""`bootseer` without a part of the environment stage: ``python -m bench.env.without PART ...``."""

from __future__ import annotations

import sys

EARLY, LENT, SPREAD, WRITERS = "early", "lent", "spread", "writers"
"""What is stored while the command runs; a process that is a copy of the caller and loads servers; another place of the
disk for each environment; processes that make the small files of one that is unpacked."""
WITHOUT = (sys.executable, "-m", "bench.env.without")
_PUBLISHER = """
import sys
from bootseer.env import publisher
publisher.Work.settled = lambda work, stop: 0.0
sys.exit(publisher.main())
"""


def main() -> None:
    part = sys.argv.pop(1)
    from bootseer.cli.main import main as cli
    from bootseer.kernel import background

    program = background.program
    if part == EARLY:
        late = (sys.executable, "-P", "-c", _PUBLISHER)
        background.program = lambda module: late if module == "bootseer.env.publisher" else program(module)
    elif part == SPREAD:
        from bootseer import folders

        folders.spread = lambda folder: None
    elif part == WRITERS:
        from bootseer.blocks.extract import tree

        tree._MANY = 1 << 62
    else:
        background.lend = lambda: None
    cli()


if __name__ == "__main__":
    main()
