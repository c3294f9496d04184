"""A server for tests of `bootseer.kernel.background`: its request is a JSON list of what it does, in turn."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from bootseer.kernel import background


def main() -> int:
    steps = json.loads(background.request("bootseer-echo"))
    answer, heard, unheard = background.Answer(), True, ""
    for name, value in steps:
        if name == "tell":  # what it is like
            facts = {
                "pid": os.getpid(),
                "name": Path("/proc/self/comm").read_text().strip(),
                "group": os.getpgid(0),
                "session": os.getsid(0),
                "parent": os.getppid(),
                "environ": os.environ.get("ECHO", ""),
                "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
                "loaded": value in sys.modules,
            }
            answer(json.dumps(facts))
        elif name == "say":
            heard = answer(value)
            if not heard and unheard:
                Path(unheard).write_text(str(os.getpid()))
                return 1
        elif name == "heard":
            Path(value).write_text(str(heard))
        elif name == "end unheard":  # as servers have to
            unheard = value
        elif name == "sleep":
            time.sleep(value)
        elif name == "print":
            print(value, flush=True)
        elif name == "wait":
            Path(value).write_text(str(os.getpid()))
            time.sleep(60)
        elif name == "exit":
            sys.exit(value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
