"""Python imports this by itself where its folder is in ``PYTHONPATH``: puts the hooks in, then makes way.

Afterwards the folder is not in ``sys.path``, and ``sitecustomize`` is the site's own module or, as without us, none.
No error of ours gets out; those of the site's module do, as always. ``__loader__`` loads our other files, so that
nothing is imported for it and nothing of it is in ``sys.modules``. A job may start any Python, so that this file is
for all of them, 2.7 too; the hooks are for 3.8 and later."""

import os
import sys


def _load(name):
    # type: (str) -> dict[str, object]
    """The names of the file ``name`` of ``bootseer.profile``."""
    path = os.path.join(os.path.dirname(os.path.dirname(_HERE)), name)
    full = "bootseer.profile." + name[:-3].replace("/", ".")
    scope = {"__name__": full, "__file__": path}  # type: dict[str, object]
    new = "__future__" not in sys.modules
    exec(type(__loader__)(full, path).get_code(full), scope)  # type: ignore[name-defined]
    if new:
        sys.modules.pop("__future__", None)
    return scope


_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if path != _HERE]
sys.path_importer_cache.pop(_HERE, None)
try:
    wanted = os.environ.get("BOOTSEER_AUTO", "0") not in ("", "0") and os.environ.get("BOOTSEER_EVENTS")
    if wanted and sys.version_info >= (3, 8):
        _load("auto/hooks.py")["install"](lambda: _load("emit.py"))  # type: ignore[operator]
except Exception:  # contextlib is not imported by every program
    pass

_self = sys.modules.pop("sitecustomize", None)  # held, or Python 2 would take this module's names away
# The site's own; where there is none, this ImportError is what Python expects.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
