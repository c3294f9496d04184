"""The hooks of a site: their scripts, and whether Slurm's settings suit them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import bootseer
from bootseer import config
from bootseer.errors import ConfigError, NotFoundError, UnavailableError, doing
from bootseer.folders import private_folder, trusted, trusted_file
from bootseer.slurm import jobfolder

PREFIX = Path("/etc/bootseer/slurm")
SECONDS = 60
LEAST_SECONDS = 15
_NAMES = {"prolog": "Prolog", "epilog": "Epilog", "task-prolog": "TaskProlog"}
_MARK = "# written by `bootseer node install`"
_ASK_SECONDS = 15.0
_TRY_SECONDS = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_HOOK = """\
#!/bin/sh
{mark}: the {name} of Slurm
{when}
read -r began _ </proc/uptime
umask 022
cd /
export HOME=/root PATH={path} {settings}
exec </dev/null >/dev/null 2>&1
timeout --foreground -s KILL {seconds} {python} -I -m bootseer.slurm.hooks {verb} {seconds} "$began"
exit 0  # any other code drains the node
"""
_WHEN = {
    "prolog": "case $SLURM_JOB_COMMENT in *bootseer*) ;; *) exit 0 ;; esac",
    "epilog": "[ -d /run/bootseer-slurm ] || exit 0",
}
_TASK = """\
#!/bin/sh
{mark}: the TaskProlog of Slurm
folder=/run/bootseer-slurm/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
[ -d "$folder" ] || folder=/run/bootseer-slurm/$SLURM_JOB_ID.0  # the count is that of the job that submitted this one
error=$folder/error
if [ "$SLURM_LOCALID" = 0 ] && [ -r "$error" ]; then
    read -r why <"$error"
    printf 'print bootseer: no image on %s: %s\n' "$SLURMD_NODENAME" "$why"
fi
exit 0
"""


def install(prefix: Path, seconds: int) -> list[Path]:
    """Write the three scripts into the folder ``prefix``; Prolog and Epilog take at most ``seconds``.

    Raises `ConfigError` when others could change what root is to run, when it would not run, when users could not run
    the TaskProlog, or when files of others are there.
    """
    check_program()
    _try(os.environ.get("BOOTSEER_CONFIG"))
    made = not prefix.exists()
    with doing(f"write {prefix}"):
        prefix = private_folder(prefix)
        if made:
            prefix.chmod(0o755)
        for folder in (prefix, *prefix.parents):
            if not folder.stat().st_mode & 0o001:
                hint = "choose another --slurm-dir, or let them (chmod o+x)"
                raise ConfigError(f"users cannot reach {prefix} through {folder}", hint=hint)
        paths = [prefix / name for name in _NAMES]
        if strangers := [path for path in paths if os.path.lexists(path) and not _is_ours(path)]:
            raise ConfigError(f"{strangers[0]} is not bootseer's", hint="choose another --slurm-dir")
        for path in paths:
            jobfolder.write(path, _script(path.name, seconds).encode(), 0o755)
    return paths


def uninstall(prefix: Path) -> list[Path]:
    """Remove what `install` has written, and ``prefix`` if nothing else is in it.

    Raises `ConfigError` while Slurm's settings name a script (a node whose Prolog is missing is drained) or an image is
    mounted (nothing else would unmount it), `UnavailableError` when Slurm does not tell its settings.
    """
    found = [path for name in _NAMES if _is_ours(path := prefix / name)]
    try:
        config = settings() if found else {}
    except NotFoundError:  # no Slurm
        config = {}
    except UnavailableError as exc:
        hint = f"try again when slurmctld answers, or remove {prefix} when slurm.conf does not name it"
        message = f"it is not known whether Slurm still runs the scripts: {exc.message}"
        raise UnavailableError(message, hint=hint) from None
    for key in _NAMES.values():
        if config.get(key, "") in [str(path) for path in found]:
            hint = f"remove the line {key}=... from slurm.conf and run scontrol reconfigure first"
            raise ConfigError(f"Slurm still runs {config[key]}", hint=hint)
    if left := jobfolder.present():
        job = left[0].name.partition(".")[0]
        hint = f"drain the node first, or unmount it with SLURM_JOB_ID={job} {prefix}/epilog"
        raise ConfigError(f"the image of job {job} is still mounted here", hint=hint)
    with doing(f"remove the scripts in {prefix}"):
        for path in found:
            path.unlink()
        if found and not os.listdir(prefix):
            prefix.rmdir()
    return found


def lines(prefix: Path, seconds: int) -> list[str]:
    """What belongs into slurm.conf."""
    hooks = [f"{key}={prefix / name}" for name, key in _NAMES.items()]
    return [*hooks, "PrologFlags=Alloc", f"BatchStartTimeout={2 * seconds}"]


def settings() -> dict[str, str]:
    """Slurm's settings, as ``scontrol show config`` prints them. Raises `UnavailableError` when it cannot say,
    `NotFoundError` without one."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise NotFoundError("there is no scontrol here") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"scontrol did not answer within {_ASK_SECONDS:g} s") from None
    except subprocess.CalledProcessError as exc:
        raise UnavailableError(f"scontrol failed: {' '.join(exc.stderr.split())}") from None
    return dict(re.findall(r"^(\S+) += (.*?)\s*$", done.stdout, re.MULTILINE))


def check(config: Mapping[str, str], prefix: Path, seconds: int) -> list[str]:
    """What in Slurm's settings keeps the hooks from working, each with what to change."""
    found = []
    for name, key in _NAMES.items():
        if (now := config.get(key, "(null)")) not in ("(null)", "", str(prefix / name)):
            found.append(f"{key} is {now} now: have that one run {prefix / name}")
    if not re.search(r"Alloc|Contain|X11", config.get("PrologFlags", "")):
        found.append("PrologFlags lacks Alloc: without it the Prolog waits for the job's first step")
    if (limit := _number(config, "BatchStartTimeout")) is not None and limit < seconds:
        found.append(f"BatchStartTimeout is {limit} s: srun may give up on a node; set {2 * seconds}")
    if (limit := _number(config, "PrologEpilogTimeout")) is not None and limit <= seconds:
        found.append(
            f"PrologEpilogTimeout is {limit} s: set it to more than {seconds}, or a slow mount drains the node"
        )
    return found


def _number(config: Mapping[str, str], key: str) -> int | None:
    """A setting in seconds; None when it is not set."""
    match = re.match(r"\d+", config.get(key, ""))
    return int(match[0]) if match and int(match[0]) not in (65534, 65535) else None


def _script(name: str, seconds: int) -> str:
    if name == "task-prolog":
        return _TASK.format(mark=_MARK)
    named = os.environ.get("BOOTSEER_CONFIG")
    return _HOOK.format(
        mark=_MARK,
        name=_NAMES[name],
        verb=name,
        when=_WHEN[name],
        path=_PATH,
        settings=f"BOOTSEER_CONFIG={shlex.quote(os.path.abspath(named))}" if named else "",
        seconds=seconds,
        python=shlex.quote(sys.executable),
    )


def _try(named: str | None) -> None:
    """Raises `ConfigError` when what the scripts run cannot even start: they never tell Slurm."""
    env = {"HOME": "/root", "PATH": _PATH} | ({"BOOTSEER_CONFIG": os.path.abspath(named)} if named else {})
    what = "from bootseer import config; from bootseer.slurm import hooks, images; config.load()"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", what], env=env, cwd="/", capture_output=True, text=True, timeout=_TRY_SECONDS,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the hooks do not start within {_TRY_SECONDS:g} s", hint="is their disk slow?") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"the hooks cannot run here: {why}", hint="install bootseer for root on this node")


def check_program() -> None:
    """Raises `ConfigError` when others could change this program, or the settings, with which root is to run."""
    for path in (Path(sys.prefix), Path(bootseer.__file__).parent):
        trusted(path.resolve())
    named = os.environ.get("BOOTSEER_CONFIG")
    if named or config.DEFAULT_FILE.exists():
        trusted_file(Path(named or config.DEFAULT_FILE))


def _is_ours(path: Path) -> bool:
    """Whether `install` has written the file."""
    try:
        return not path.is_symlink() and _MARK in path.read_text().splitlines()[1]
    except (OSError, UnicodeDecodeError, IndexError):
        return False
