"""`bootseer` without a part of the environment stage: ``python -m bench.env.without PART ...``."""

from __future__ import annotations

import sys

EARLY, LENT = "early", "lent"
"""What is stored while the command runs; a process that is a copy of the caller and loads servers."""
WITHOUT = (sys.executable, "-m", "bench.env.without")
_PUBLISHER = """
import sys
from bootseer.env import publisher
publisher.Work.settled = lambda work, stop: None
sys.exit(publisher.main())
"""


def main() -> None:
    part = sys.argv.pop(1)
    from bootseer.cli.main import main as cli
    from bootseer.env import publication
    from bootseer.kernel import background

    if part == EARLY:
        publication.PROGRAM = (sys.executable, "-P", "-c", _PUBLISHER)
    else:
        background.lend = lambda: None
    cli()


if __name__ == "__main__":
    main()
