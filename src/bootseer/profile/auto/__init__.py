"""Spans of training code that nobody changed: which variables have the interpreter of a job record its own start.

``PYTHONPATH`` begins with a folder whose ``sitecustomize`` Python imports by itself; that puts `hooks` in, and runs the
site's own ``sitecustomize``. Standard library only, Python 3.8 or later: containers mount it beside
``bootseer.profile.emit``. What is recorded: ``docs/howto/profile.md``."""

from __future__ import annotations

import os

SITE = "profile/auto/site"
"""Where the folder with ``sitecustomize`` lies, below the package ``bootseer``."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def variables(pythonpath: str = "", package: str = _PACKAGE) -> dict[str, str]:
    """The variables that turn the hooks on in every Python started with them; ``pythonpath`` is what the job has.
    ``package`` is the folder of ``bootseer`` as the job sees it."""
    site = package + "/" + SITE
    return {"BOOTSEER_AUTO": "1", "PYTHONPATH": site + os.pathsep + pythonpath if pythonpath else site}
