"""What a registry says to a pod: asked in a process that is nobody, with the logins of the pod and no others.

So neither logins nor client certificates of root count, and a registry that drips is not waited for.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import msgspec

from bootseer import oci
from bootseer.config import Config
from bootseer.errors import BootseerError, UnavailableError, from_exit_code
from bootseer.node.access import Answer, User, become
from bootseer.oci.credentials import Logins

_NOBODY = User(65534, 65534, "nobody", "/nonexistent")
_SECONDS = 60.0


class _Question(msgspec.Struct):
    reference: str
    logins: Logins
    plain_http: tuple[str, ...]


def digest_for(ref: oci.Reference, logins: Logins, config: Config) -> str:
    """The digest of the manifest that the registry gives for ``ref``. Raises as `oci.resolve_digest`, and
    `UnavailableError` when it takes longer than a minute."""
    question = msgspec.json.encode(_Question(str(ref), logins, config.plain_http))
    argv = [sys.executable, "-I", "-m", "bootseer.csi.ask"]
    try:
        done = subprocess.run(argv, input=question, stdout=subprocess.PIPE, timeout=_SECONDS, check=False)
        answer = msgspec.json.decode(done.stdout, type=Answer)
    except (subprocess.TimeoutExpired, ValueError):
        raise UnavailableError(
            f"nobody could ask for {ref} within {_SECONDS:g} s", hint="does its registry work?"
        ) from None
    if answer.code:
        raise from_exit_code(answer.code, answer.message, hint=answer.hint)
    return answer.digest


def _main() -> None:
    answer = Answer()
    try:
        question = msgspec.json.decode(sys.stdin.buffer.read(), type=_Question)
        become(_NOBODY, Config(plain_http=question.plain_http), {})
        answer.digest = oci.digest_for(oci.Reference.parse(question.reference), question.logins)
    except BootseerError as exc:
        answer = Answer(code=exc.exit_code, message=exc.message, hint=exc.hint)
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    _main()
