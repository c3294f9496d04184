"""``python weigh.py BYTES``: whether the pickle on stdin is decoded within so many bytes of memory.

A few bytes of a pickle can ask for gigabytes before anything of it can be checked, so `bootseer.torch.pickles` has this
process decode it first, with a limit on its memory. It makes stand-ins of about the same size for what the pickle names
and runs none of it. Exit code `TOO_MUCH` says no; whatever else is wrong is for who decodes it after this. A script of
its own, of the standard library only, and quick to start."""

import collections
import io
import pathlib
import pickle
import resource
import sys

TOO_MUCH = 9
"""Exit code."""


_states: list[object] = []


class _StandIn:
    def __init__(self, *given: object) -> None:
        pass

    def __setstate__(*given: object) -> None:
        """Of any kind, also of the class itself, which stands in for functions and types. Were it an error here, what
        follows in the pickle would not be weighed."""
        _states.append(given[-1])


class _Size(tuple):  # type: ignore[type-arg]
    pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name == "Size":
            return _Size
        if name == "OrderedDict":
            return collections.OrderedDict
        return pathlib.PurePath if "Path" in name else _StandIn

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("it refers to other objects")


def main() -> int:
    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        _Unpickler(io.BytesIO(sys.stdin.buffer.read())).load()
    except MemoryError:
        return TOO_MUCH
    except Exception:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
