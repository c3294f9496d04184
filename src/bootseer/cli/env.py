"""``bootseer env``: snapshots of what a set-up command makes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import (
    COMMAND_LAST,
    AsJson,
    DryRun,
    Limit,
    StoreUrl,
    age_value,
    answer,
    answer_table,
    old_name,
    open_shared,
    print_json,
    print_table,
    settings,
    time_text,
)
from bootseer.units import size_text

if TYPE_CHECKING:
    from bootseer.env import EnvResult, EnvSpec
    from bootseer.env.manifest import SnapshotManifest
    from bootseer.objects import Store

app = typer.Typer(
    no_args_is_help=True, help="Run a set-up command once per distinct input, restore its result elsewhere"
)

_UNMOUNT_SECONDS = 60.0
"""How long an unmount waits for an `env run` on the same target."""

Targets = Annotated[list[str], typer.Option("--target", help="Directory the command fills (repeatable)")]
KeyFiles = Annotated[list[str], typer.Option("--key-file", help="File whose content decides the result")]
KeyEnv = Annotated[list[str], typer.Option("--key-env", help="Variable whose value decides the result")]
Salt = Annotated[str, typer.Option(help="Any text; another salt is another key")]
MaxAge = Annotated[
    float | None,
    typer.Option(
        parser=age_value, metavar="AGE", help="Use no snapshot that is older: 12h, 7d; for unpinned requirements"
    ),
]
Restore = Annotated[str, typer.Option(help="auto, mount or unpack")]
Python = Annotated[str, typer.Option(help="Interpreter the environment is for; else python3 on PATH")]
Command = Annotated[list[str], typer.Argument(metavar="CMD...", help="The command, after all options")]
Key = Annotated[str, typer.Argument(help="Key, or its first digits")]


@app.command(context_settings=COMMAND_LAST)
def run(
    command: Command,
    target: Targets,
    key_file: KeyFiles = [],  # noqa: B006
    key_env: KeyEnv = [],  # noqa: B006
    salt: Salt = "",
    max_age: MaxAge = None,
    store: StoreUrl = "",
    restore: Restore = "auto",
    python: Python = "",
    wait: Annotated[float, typer.Option(help="Most seconds to wait for another node that runs the command")] = 1800.0,
    snapshot: Annotated[bool, typer.Option("--snapshot/--no-snapshot", help="Use and make snapshots")] = True,
    as_json: AsJson = False,
) -> None:
    """Restore the command's result, or run it and publish what it made. The exit code is the command's.

    Example: bootseer env run --target /opt/env pip install --target /opt/env -r requirements.txt
    """
    from bootseer import env

    spec = _spec(command, target, key_file, key_env, salt, max_age, restore, python, snapshot, wait)
    config = settings(store)
    result = env.run(spec, lambda: _execute(command, quiet=as_json), store_url=config.store_url, config=config)
    _print_result(result, as_json)
    raise typer.Exit(result.exit_code)


@app.command(context_settings=COMMAND_LAST)
def explain(
    command: Command,
    target: Targets,
    key_file: KeyFiles = [],  # noqa: B006
    key_env: KeyEnv = [],  # noqa: B006
    salt: Salt = "",
    max_age: MaxAge = None,
    store: StoreUrl = "",
    restore: Restore = "auto",
    python: Python = "",
    as_json: AsJson = False,
) -> None:
    """Print the key document, whether it is a hit here and now, and why not. Changes nothing."""
    import msgspec

    from bootseer.env import capture, key, lookup
    from bootseer.env.inputs import compared

    spec = _spec(command, target, key_file, key_env, salt, max_age, restore, python, True, 0.0)
    spec.check()
    config = settings(store)
    document = key.build(spec)
    unpacking = not capture.may_mount(spec)
    look = lookup.look(spec, document, config.store_url, config, unpacking=unpacking)
    shown = msgspec.to_builtins(document)
    near = look.found or look.nearest
    inputs = msgspec.to_builtins(near.inputs) if near else None
    if as_json:
        answer = {"key": look.key, "hit": look.found is not None, "reason": look.reason, "document": shown}
        print_json({**answer, "inputs": inputs})
        return
    for entry in shown["files"].values():
        entry.pop("text")
    print_json(shown)
    if near:
        count = near.inputs.unobserved or len(near.inputs.files)
        typer.echo(f"files that the command read for snapshot {near.shown}: {count}")
        for path, state in compared(spec, config, near.inputs.files):
            typer.echo(f"{state:7} {path}")
    typer.echo(f"key {look.key}")
    typer.echo("hit" if look.found else look.reason)


@app.command()
def ls(store: StoreUrl = "", limit: Limit = 0, as_json: AsJson = False) -> None:
    """List the snapshots in the store, newest first."""
    from bootseer.env import snapshots

    shared = open_shared(store)
    found = snapshots.everything(shared)[: limit or None]
    columns = ("key", "made", "by", "size", "stored", "entries", "took", "targets")
    rows = [
        (
            item.shown,
            time_text(item.created),
            item.node,
            size_text(item.size),
            size_text(item.stored),
            str(item.entries),
            f"{item.seconds:.1f} s",
            " ".join(item.document.targets),
        )
        for item in found
    ]
    brief = [_brief(item) for item in found]
    empty = f"no snapshot is in store {shared.shown} yet: bootseer env run makes them"
    answer_table(brief, as_json, columns, rows, ("key", "made", "by", "targets"), empty)


@app.command()
def inspect(
    key: Key,
    store: StoreUrl = "",
    files: Annotated[bool, typer.Option("--files", help="List its files too")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a snapshot: who made it, from what, and with --files what is in it. --json prints the whole manifest."""
    import msgspec

    from bootseer.env import snapshots

    shared = open_shared(store)
    found = snapshots.load(shared, key)
    entries = [[e.kind, oct(e.mode), e.size, e.path] for e in snapshots.entries(shared, found)] if files else []
    if as_json:
        print_json(msgspec.to_builtins(found) | ({"files": entries} if files else {}))
        return
    made = f"{time_text(found.created)} by {found.node} in {found.seconds:.1f} s"
    typer.echo(f"snapshot {found.name}\n  made     {made}\n  command  {shlex.join(found.document.command)}")
    typer.echo(f"  targets  {' '.join(found.document.targets)}")
    typer.echo(f"  size     {size_text(found.size)} in {found.entries} entries, {size_text(found.stored)} stored")
    if files:
        rows = [(str(kind), str(mode), str(size), str(path)) for kind, mode, size, path in entries]
        print_table("", ("kind", "mode", "size", "path"), rows, left=("kind", "path"))


@app.command()
def diff(first: Key, second: Key, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Say in which inputs and in which files two snapshots differ."""
    from bootseer.env import snapshots
    from bootseer.env.explain import changes, entry_changes, input_changes

    shared = open_shared(store)
    old, new = (snapshots.load(shared, key) for key in (first, second))
    inputs = changes(old.document, new.document) + input_changes(old.inputs, new.inputs)
    entries = entry_changes(snapshots.entries(shared, old), snapshots.entries(shared, new))
    lines = [*inputs, *(f"{sign} {path}" for sign, path in entries)]
    answer({"inputs": inputs, "files": entries}, as_json, *lines)


@app.command()
def verify(key: Key, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Fetch a whole snapshot and check every block and every file of it.

    Exit code 65 when it is damaged. A good one that was in quarantine on this node is used again.
    """
    import tempfile
    from pathlib import Path

    from rich.console import Console

    from bootseer.env import quarantine, snapshots

    shared = open_shared(store)
    found = snapshots.load(shared, key)
    base = Path(settings().cache_dir)
    base.mkdir(parents=True, exist_ok=True)
    with Console(stderr=True).status(f"verifying {found.key[:12]}"), tempfile.TemporaryDirectory(dir=base) as work:
        count = snapshots.verify(shared, found, Path(work))
    quarantine.lift(base, quarantine.mark_of(found))
    line = f"snapshot {found.key[:12]} is good: {count} entries"
    answer({"ok": True, "key": found.key, "entries": count, "size": found.size}, as_json, line)


@app.command()
def rm(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys, or their first digits")],
    dry_run: DryRun = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Remove snapshots from the store: the next start runs the command. What is mounted goes on.

    Blocks stay in the store, because images and other snapshots may have them in common.
    """
    from bootseer.env import snapshots

    shared = open_shared(store)
    _remove(shared, [snapshots.resolve(shared, key) for key in keys], dry_run, as_json)


@app.command()
def gc(
    age: Annotated[
        float | None,
        typer.Option(parser=age_value, metavar="AGE", help="Remove snapshots from the store that are older: 30d"),
    ] = None,
    dry_run: DryRun = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Remove what killed runs and earlier boots left on this node; with --age also old snapshots, as env rm does.

    Example: bootseer env gc --age 30d --dry-run
    """
    import time

    from bootseer.env import overlay, snapshots

    if not dry_run:
        overlay.sweep(settings(store))
    shared = open_shared(store)
    limit = time.time() - age if age is not None else 0.0
    found = snapshots.everything(shared) if age is not None else []
    _remove(shared, [one.name for one in found if one.created < limit], dry_run, as_json)


def _remove(shared: Store, keys: list[str], dry_run: bool, as_json: bool) -> None:
    from bootseer.env import snapshots

    if not dry_run:
        snapshots.remove(shared, keys)
    lines = [f"{'would remove' if dry_run else 'removed'} snapshot {key[:12]}" for key in keys]
    answer({"dry_run": dry_run, "removed": [{"key": key} for key in keys]}, as_json, *lines)


@app.command()
def unmount(
    target: Annotated[list[str] | None, typer.Argument(metavar="DIR...", help="Targets of env run")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that env run mounted on this node")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what running processes use")] = False,
    as_json: AsJson = False,
) -> None:
    """Unmount what env run left on targets; what was in them before the first run shows again.

    What other processes use stays, with exit code 73.
    """
    import os
    from pathlib import Path

    from bootseer.env import lock, overlay
    from bootseer.errors import ConfigError, NotFoundError, NotWritableError

    state = Path(settings().state_dir)
    if everything:
        found = overlay.groups(state, os.getppid())[::-1]
    elif target:
        found = overlay.groups_on([Path(os.path.abspath(item)) for item in target], state, os.getppid())
        if not found:
            raise NotFoundError(f"nothing of bootseer is mounted on {' '.join(target)}")
    else:
        raise ConfigError("no target is named to unmount", hint="name its folder, or say --all")
    done, left = [], []
    for group in found:
        shown = " ".join(str(item.host) for item in group.record.targets)
        with lock.locked(tuple(group.record.targets), state, wait=_UNMOUNT_SECONDS), lock.groups_locked(state):
            if not force and (who := group.in_use):
                left.append(f"{shown} ({who})")
                continue
            group.take_down()
        done.append(shown)
    lines = [f"unmounted {shown}" for shown in done] or ["nothing was unmounted"]
    answer([{"target": shown, "mounted": False} for shown in done], as_json, *lines)
    if left:
        raise NotWritableError(f"still in use: {', '.join(left)}", hint="end that, or unmount it with --force")


@app.command(hidden=True)
def release(
    target: Annotated[list[str], typer.Option("--target")] = [],  # noqa: B006
    everything: Annotated[bool, typer.Option("--all")] = False,
    force: Annotated[bool, typer.Option("--force")] = False,
) -> None:
    """The old name of `bootseer env unmount`, until the next version."""
    old_name("env release --target DIR", "env unmount DIR")
    unmount(target, everything, force)


def _spec(
    command: list[str],
    targets: list[str],
    key_files: list[str],
    key_env: list[str],
    salt: str,
    max_age: float | None,
    restore: str,
    python: str,
    snapshot: bool,
    wait: float,
) -> EnvSpec:
    import os

    from bootseer.env import EnvSpec, Target
    from bootseer.errors import ConfigError

    if restore not in ("auto", "mount", "unpack"):
        raise ConfigError(f"--restore {restore} is unknown", hint="use auto, mount or unpack")
    return EnvSpec(
        targets=tuple(Target(os.path.abspath(item)) for item in targets),
        command=tuple(command),
        key_files=tuple(key_files),
        key_env=tuple(key_env),
        salt=salt,
        max_age=max_age,
        python=python,
        restore=restore,  # type: ignore[arg-type]
        caller=os.getppid(),
        snapshot=snapshot,
        wait=wait,
    )


def _execute(command: list[str], *, quiet: bool) -> int:
    """Run the command in the foreground; with JSON output its stdout goes to stderr."""
    import subprocess
    import sys

    try:
        done = subprocess.run(command, stdout=sys.stderr if quiet else None, check=False)
    except FileNotFoundError:
        typer.echo(f"bootseer: cannot run {command[0]}: no such command", err=True)
        return 127
    except OSError as exc:
        typer.echo(f"bootseer: cannot run {command[0]}: {exc.strerror}", err=True)
        return 126
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _brief(item: SnapshotManifest) -> dict[str, object]:
    return {
        "key": item.key,
        "name": item.name,
        "created": item.created,
        "node": item.node,
        "size": item.size,
        "stored": item.stored,
        "entries": item.entries,
        "seconds": item.seconds,
        "targets": item.document.targets,
        "command": item.document.command,
    }


def _print_result(result: EnvResult, as_json: bool) -> None:
    if as_json:
        answer = {
            "outcome": result.outcome,
            "reason": result.reason,
            "exit_code": result.exit_code,
            "seconds": round(result.seconds, 6),
            "key": result.key,
            "timings": result.timings,
        }
        print_json(answer)
        return
    steps = ", ".join(f"{name} {_seconds(value)}" for name, value in result.timings.items())
    typer.echo(f"env: {result.outcome.value} ({result.reason}), key {result.key[:12]}; {steps}", err=True)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
