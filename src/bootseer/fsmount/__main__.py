"""The processes of a mount, a `bootseer.kernel.background` server.

Its request is a `ServerSpec`. It answers when the mount works: with its `Record`, or with class, message and hint of
the error that kept it from starting.
"""

from __future__ import annotations

import logging
import os
import resource
import signal

import msgspec

from bootseer.errors import BootseerError, from_os_error
from bootseer.fsmount.record import ServerSpec
from bootseer.fsmount.supervisor import Answer, Supervisor
from bootseer.kernel import background
from bootseer.loglimit import LogRateLimit


def main() -> None:
    spec = msgspec.json.decode(background.request("bootseer-fs"), type=ServerSpec)
    say = background.Answer()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each file that is open is several here
    os.chdir("/")

    def answer(found: Answer | None) -> None:
        if not say(msgspec.json.encode(found).decode() if found else ""):
            logging.warning("nobody waits for this mount any more")
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        Supervisor(spec, answer).run()
    except (BootseerError, OSError) as exc:
        error = exc if isinstance(exc, BootseerError) else from_os_error(exc, f"serve {spec.mountpoint}")
        logging.error("%s", error)
        answer((type(error).__name__, error.message, error.hint))
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
