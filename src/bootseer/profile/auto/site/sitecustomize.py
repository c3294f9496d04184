"""Python imports this by itself where its folder is in ``PYTHONPATH``: puts the hooks in, then makes way.

Afterwards the folder is not in ``sys.path``, and ``sitecustomize`` is the site's own module or, as without us, none.
No error of ours gets out; those of the site's module do, as always. ``__loader__`` loads our other files, so that
nothing is imported for it and nothing of it is in ``sys.modules``.
"""

import os
import sys


def _load(name: str) -> "dict[str, object]":
    """The names of the file ``name`` of ``bootseer.profile``."""
    path = os.path.join(os.path.dirname(os.path.dirname(_HERE)), name)
    scope: dict[str, object] = {"__name__": "bootseer.profile." + name[:-3].replace("/", "."), "__file__": path}
    new = "__future__" not in sys.modules
    exec(type(__loader__)(scope["__name__"], path).get_code(scope["__name__"]), scope)  # type: ignore[name-defined]
    if new:
        sys.modules.pop("__future__", None)
    return scope


_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if path != _HERE]
sys.path_importer_cache.pop(_HERE, None)
try:
    if os.environ.get("BOOTSEER_AUTO", "0") not in ("", "0") and os.environ.get("BOOTSEER_EVENTS"):
        _load("auto/hooks.py")["install"](lambda: _load("emit.py"))  # type: ignore[operator]
except Exception:  # contextlib is not imported by every program
    pass

sys.modules.pop("sitecustomize", None)
# The site's own; where there is none, this ImportError is what Python expects.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
