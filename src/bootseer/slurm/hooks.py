"""Prolog and Epilog of a node: ``python -m bootseer.slurm.hooks prolog|epilog SECONDS BEGAN``, from `site`'s scripts.

A hook that fails, or that Slurm finds too slow, drains its node; and slurmd kills the process group of a hook and waits
for its standard output. So the hook itself only starts a worker, with a session and output of its own, and waits for it
within its time. It exits with 0 whatever happens: trouble is told in the job folder, where the job's steps find it, and
in the log."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.kernel import flock
from bootseer.loglimit import OneLine
from bootseer.profile.emit import redact
from bootseer.slurm import comment, jobfolder
from bootseer.slurm.jobfolder import Attempt

log = logging.getLogger(__name__)

_RESERVE = 8.0
"""What the hook keeps of its seconds to end a worker that took all others."""
_GRACE = 4.0
_STOP_SECONDS = 20.0
_LOG_BYTES = 1 << 20


def main(argv: list[str]) -> int:
    """Carry out ``argv``: a hook, or the work of one."""
    what = {"prolog": _prolog, "epilog": _epilog, "mount": _mount, "unmount": _unmount}[argv[0]]
    job = os.environ.get("SLURM_JOB_ID", "?")
    try:
        _log_to(jobfolder.base() / jobfolder.LOG, f"job {job} {argv[0]}")
        what(argv[1:])
    except (BootseerError, OSError) as exc:
        log.error("%s", exc)
    except Exception:
        log.exception("failed")
    return 0


def _log_to(path: Path, who: str) -> None:
    """Write the log to the end of ``path``, and begin a new one when it is long; its predecessor stays."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            path.rename(path.with_suffix(".1"))
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))  # references of all users are in it
    handler = logging.FileHandler(path)
    handler.setFormatter(OneLine(f"%(asctime)s {who.replace('%', '')} %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _prolog(argv: list[str]) -> None:
    seconds, began = map(float, argv)
    if not comment.concerns_us(os.environ.get("SLURM_JOB_COMMENT", "")):
        return
    attempt, user = Attempt.of(os.environ), int(os.environ["SLURM_JOB_UID"])
    made = jobfolder.make(attempt, user, began)
    if made is None:
        log.warning("removing %s of a job that had no Epilog; the controller may have lost its state", attempt.folder)
        with contextlib.suppress(FileNotFoundError):  # its Epilog comes just now
            (attempt.folder / jobfolder.ENDED).touch(0o600)
        _wait(_start("unmount"), seconds, began)
        made = jobfolder.make(attempt, user, began)
    if made is None:
        raise BootseerError(f"{attempt.folder} cannot be removed", hint="look what keeps it, and unmount it")
    folder, lock = made
    worker = _start("mount", str(folder), lock=lock)
    os.close(lock)  # from here on only the worker holds it
    if not _wait(worker, seconds, began):
        worker.terminate()
        if not _ended(worker, _GRACE):
            worker.kill()
            _ended(worker, 1.0)
        if not jobfolder.has_answer(folder):
            jobfolder.fail(folder, f"the image was not mounted within {seconds:g} s; its registry or its store is slow")
    elif not jobfolder.has_answer(folder):
        jobfolder.fail(folder, "preparing the image failed; the administrator finds more in the log of the node")


def _epilog(argv: list[str]) -> None:
    seconds, began = map(float, argv)
    jobfolder.end(Attempt.of(os.environ).job, began)
    if any(jobfolder.ended()) and not _wait(_start("unmount"), seconds, began):
        log.warning("unmounting takes long; it goes on behind the Epilog")


def _start(*work: str, lock: int = -1) -> subprocess.Popen[bytes]:
    """A worker. It has left our process group when this returns, so slurmd does not kill it with us."""
    with open(jobfolder.BASE / jobfolder.LOG, "ab") as out:
        return subprocess.Popen(
            [sys.executable, "-I", "-m", "bootseer.slurm.hooks", *work],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            pass_fds=[lock] if lock >= 0 else [],
        )


def _wait(worker: subprocess.Popen[bytes], seconds: float, began: float) -> bool:
    """Whether the worker of a hook that began at ``began`` and may take ``seconds`` ended in time."""
    return _ended(worker, began + seconds - _RESERVE - time.clock_gettime(time.CLOCK_BOOTTIME))


def _ended(worker: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(max(0.0, seconds))
        return True
    return False


def _mount(argv: list[str]) -> None:
    """Mount what the job asks for. SIGTERM undoes it."""
    from bootseer import config as settings
    from bootseer.slurm import images

    folder = Path(argv[0])
    (folder / jobfolder.LOCK).write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, _leave)
    try:
        wish = comment.parse(os.environ["SLURM_JOB_COMMENT"])
        config = settings.load()
        jobfolder.show(folder, images.mount(wish, folder, int(os.environ["SLURM_JOB_UID"]), config))
    except BootseerError as exc:
        log.error("%s", exc)
        jobfolder.fail(folder, " ".join(redact("", str(exc)).split()))  # users read it
    else:
        log.info("mounted %s", wish.reference)


def _leave(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one does not disturb what is undone on the way out
    sys.exit(128 + number)


def _unmount(_: list[str]) -> None:
    """Remove all that has ended, also what an earlier Epilog could not."""
    for folder in jobfolder.ended():
        try:
            with open(folder / jobfolder.ENDED, "rb") as mark:
                if flock.lock(mark.fileno()):  # else another Epilog is at it
                    _remove(folder)
        except FileNotFoundError:
            continue  # another one was quicker
        except (BootseerError, OSError) as exc:
            log.error("%s stays until the next Epilog: %s", folder, exc)


def _remove(folder: Path) -> None:
    from bootseer.kernel.removal import remove_tree
    from bootseer.slurm import images

    with open(folder / jobfolder.LOCK, "rb") as lock:
        _stop(lock.fileno())
        images.unmount(folder)
        remove_tree(folder)
    log.info("removed %s", folder)


def _stop(lock: int) -> None:
    """See to it that nobody holds ``lock`` any more: end the worker that does. Raises `BootseerError`."""
    for send in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _STOP_SECONDS
        told = False
        while not flock.lock(lock, 0.1):
            if not told and (pid := int(os.pread(lock, 20, 0) or 0)):
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(pid)
                    if not flock.lock(lock):  # so it is still the holder whose number this is
                        signal.pidfd_send_signal(fd, send)
                    os.close(fd)
                told = True
            if time.monotonic() >= until:
                break
        else:
            return
    raise BootseerError("who mounts the image of the job cannot be ended", hint="its disk or its store may hang")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
