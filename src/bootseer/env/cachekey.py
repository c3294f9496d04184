"""What decides whether compiled code is of use on a node: the facts in the key of a compile cache. Frameworks look
again at all that matters; what is here keeps apart what would only be carried along. Host names, jobs' numbers and the
paths of one start are no facts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bootseer.config import Config
from bootseer.env import hardware, key
from bootseer.env.credentials import remove_from_variable
from bootseer.env.spec import EnvSpec, Target
from bootseer.errors import ConfigError

_VARIABLES = re.compile(
    r"OMP_NUM_THREADS|ATEN_CPU_CAPABILITY|TORCH_CUDA_ARCH_LIST|CC|CXX|CUDA_HOME|XLA_FLAGS|TRITON_INTERPRET"
    r"|(?:TORCHINDUCTOR|TORCHDYNAMO|TORCH_COMPILE|PYTORCH_JIT)_\w+"
)
_NO_MATTER = re.compile(r"\w*(?:CACHE|LOG|DEBUG|TRACE|PROFIL|THREADS_PER|WORKER|COMPILE_THREADS)\w*")
_PACKAGES = ("torch", "triton", "jax", "jaxlib", "pytorch_triton", "tensorflow")
_ASK = (
    "import importlib.metadata as m,importlib.util as u\n"
    f"for n in {_PACKAGES!r}:\n"
    " try:\n  s=u.find_spec(n)\n  s and print(n,m.version(n),s.origin)\n"
    " except Exception: pass"
)


def facts(environ: Mapping[str, str], packages: Iterable[str]) -> dict[str, str]:
    """Those of this node, of ``environ`` (the variables of the programs), and ``packages``."""
    found = {
        name: remove_from_variable(name, value)
        for name, value in environ.items()
        if _VARIABLES.fullmatch(name) and not _NO_MATTER.fullmatch(name)
    }
    return {**found, "cpu": hardware.cpu(), "gpu": hardware.gpu(), "packages": ", ".join(sorted(packages))}


def imported(command: Sequence[str], environ: Mapping[str, str], config: Config) -> list[str]:
    """Versions and places of the frameworks that the interpreter of ``command`` on this host imports; that is asked."""
    spec = EnvSpec(targets=(Target("/none"),), command=tuple(command), environ=environ)
    with contextlib.suppress(ConfigError, OSError, subprocess.SubprocessError):
        if python := key.find_python(spec):
            about = key.describe(python, config)
            command = [os.path.abspath(python), "-c", _ASK]
            done = subprocess.run(  # not in the working folder, which -c imports from
                command, cwd="/", capture_output=True, text=True, timeout=30, env=dict(environ), check=False
            )
            return [f"{about.implementation} {about.version}", *done.stdout.splitlines()]
    return []


def installed(folders: Iterable[tuple[Path, str]]) -> list[str]:
    """The same for the ``folders`` (on this host, and as a container sees them) that a container is shown."""
    found = []
    for folder, shown in folders:
        for way in ("", "lib/python3*/site-packages/", "*/lib/python3*/site-packages/"):
            for name in _PACKAGES:
                for path in folder.glob(f"{way}{name}-*.dist-info"):
                    found.append(f"{path.name.removesuffix('.dist-info')} {shown}/{path.parent.relative_to(folder)}")
    return found
