"""``bootseer env``: snapshots of what a set-up command makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import COMMAND_LAST, AsJson, StoreUrl, print_json, print_table
from bootseer.units import size_text

if TYPE_CHECKING:
    from bootseer.config import Config
    from bootseer.env import EnvResult, EnvSpec
    from bootseer.env.manifest import SnapshotManifest
    from bootseer.store import Store

app = typer.Typer(
    no_args_is_help=True, help="Run a set-up command once per distinct input, restore its result elsewhere"
)

_RELEASE_SECONDS = 60.0
"""How long a release waits for an `env run` on the same target."""

Targets = Annotated[list[str], typer.Option("--target", help="Directory the command fills (repeatable)")]
KeyFiles = Annotated[list[str], typer.Option("--key-file", help="File whose content decides the result")]
KeyEnv = Annotated[list[str], typer.Option("--key-env", help="Variable whose value decides the result")]
Salt = Annotated[str, typer.Option(help="Any text; another salt is another key")]
MaxAge = Annotated[str, typer.Option(help="Do not use older snapshots, e.g. 7d; for unpinned requirements")]
Restore = Annotated[str, typer.Option(help="auto, mount or unpack")]
Python = Annotated[str, typer.Option(help="Interpreter the environment is for; else python3 on PATH")]
Command = Annotated[list[str], typer.Argument(metavar="CMD...", help="The command, after all options")]
Key = Annotated[str, typer.Argument(help="Key, or its first digits")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys, or their first digits")]


@app.command(context_settings=COMMAND_LAST)
def run(
    command: Command,
    target: Targets,
    key_file: KeyFiles = [],  # noqa: B006
    key_env: KeyEnv = [],  # noqa: B006
    salt: Salt = "",
    max_age: MaxAge = "",
    store: StoreUrl = "",
    restore: Restore = "auto",
    python: Python = "",
    wait: Annotated[float, typer.Option(help="Most seconds to wait for another node that runs the command")] = 1800.0,
    snapshot: Annotated[bool, typer.Option("--snapshot/--no-snapshot", help="Use and make snapshots")] = True,
    as_json: AsJson = False,
) -> None:
    """Restore the command's result, or run it and publish what it made. The exit code is the command's."""
    from bootseer import env

    spec = _spec(command, target, key_file, key_env, salt, max_age, restore, python, snapshot, wait)
    config, url = _place(store)
    result = env.run(spec, lambda: _execute(command, quiet=as_json), store_url=url, config=config)
    _print_result(result, as_json)
    raise typer.Exit(result.exit_code)


@app.command(context_settings=COMMAND_LAST)
def explain(
    command: Command,
    target: Targets,
    key_file: KeyFiles = [],  # noqa: B006
    key_env: KeyEnv = [],  # noqa: B006
    salt: Salt = "",
    max_age: MaxAge = "",
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
    config, url = _place(store)
    document = key.build(spec)
    unpacking = spec.restore == "unpack" or not capture.may_mount(spec)
    look = lookup.look(spec, document, url, config, unpacking=unpacking)
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
        typer.echo(
            f"files that the command read for snapshot {near.shown}: {near.inputs.unobserved or len(near.inputs.files)}"
        )
        for path, state in compared(spec, config, near.inputs.files):
            typer.echo(f"{state:7} {path}")
    typer.echo(f"key {look.key}")
    typer.echo("hit" if look.found else look.reason)


@app.command()
def ls(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """List the snapshots in the store, newest first."""
    import time

    from bootseer.env import snapshots

    found = snapshots.everything(_store(store))
    if as_json:
        print_json([_brief(item) for item in found])
        return
    columns = ("key", "made", "by", "size", "stored", "entries", "took", "targets")
    rows = [
        (
            item.shown,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(item.created)),
            item.node,
            size_text(item.size),
            size_text(item.stored),
            str(item.entries),
            f"{item.seconds:.1f} s",
            " ".join(item.document.targets),
        )
        for item in found
    ]
    print_table("", columns, rows, left=("key", "made", "by", "targets"))


@app.command()
def inspect(
    key: Key, store: StoreUrl = "", files: Annotated[bool, typer.Option(help="List entries too")] = False
) -> None:
    """Print a snapshot's manifest as JSON; with --files also its inventory."""
    import msgspec

    from bootseer.env import snapshots

    shared = _store(store)
    found = snapshots.load(shared, key)
    answer = msgspec.to_builtins(found)
    if files:
        answer["files"] = [[e.kind, oct(e.mode), e.size, e.path] for e in snapshots.entries(shared, found)]
    print_json(answer)


@app.command()
def diff(first: Key, second: Key, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Say in which inputs and in which files two snapshots differ."""
    from bootseer.env import snapshots
    from bootseer.env.explain import changes, entry_changes, input_changes

    shared = _store(store)
    old, new = (snapshots.load(shared, key) for key in (first, second))
    inputs = changes(old.document, new.document) + input_changes(old.inputs, new.inputs)
    entries = entry_changes(snapshots.entries(shared, old), snapshots.entries(shared, new))
    if as_json:
        print_json({"inputs": inputs, "files": entries})
        return
    for line in inputs:
        typer.echo(line)
    for sign, path in entries:
        typer.echo(f"{sign} {path}")


@app.command()
def verify(key: Key, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Fetch a whole snapshot and check every block and every file of it. Exit code 65 when it is damaged; a good one
    is used on this node again, if it was not."""
    import tempfile
    from pathlib import Path

    from rich.console import Console

    from bootseer.env import quarantine, snapshots

    shared = _store(store)
    found = snapshots.load(shared, key)
    config, _ = _place(store)
    base = Path(config.cache_dir)
    base.mkdir(parents=True, exist_ok=True)
    with Console(stderr=True).status(f"verifying {found.key[:12]}"), tempfile.TemporaryDirectory(dir=base) as work:
        count = snapshots.verify(shared, found, Path(work))
    quarantine.lift(base, quarantine.mark_of(found))
    if as_json:
        print_json({"key": found.key, "entries": count, "size": found.size, "good": True})
    else:
        typer.echo(f"snapshot {found.key[:12]} is good: {count} entries")


@app.command()
def rm(keys: Keys, store: StoreUrl = "") -> None:
    """Remove snapshots from the store: the next start runs the command. What is mounted goes on.

    Blocks stay in the store, because images and other snapshots may have them in common.
    """
    from bootseer.env import snapshots

    shared = _store(store)
    for key in [snapshots.resolve(shared, key) for key in keys]:
        snapshots.remove(shared, key)
        typer.echo(f"removed snapshot {key[:12]}")


@app.command()
def gc(
    age: Annotated[str, typer.Option(help="Remove snapshots from the store that are older, e.g. 30d")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which snapshots would be removed")] = False,
    store: StoreUrl = "",
) -> None:
    """Remove what killed runs and earlier boots left on this node; with --age also old snapshots, as env rm does."""
    import time

    from bootseer.env import overlay, parse_age, snapshots

    limit = time.time() - parse_age(age) if age else 0.0
    if not dry_run:
        overlay.sweep(_place(store)[0])
    if not age:
        return
    shared = _store(store)
    for found in snapshots.everything(shared):
        if found.created < limit:
            if not dry_run:
                snapshots.remove(shared, found.name)
            typer.echo(f"{'would remove' if dry_run else 'removed'} snapshot {found.key[:12]}")


@app.command()
def release(
    target: Annotated[list[str], typer.Option("--target", help="Directory under an overlay of env run")] = [],  # noqa: B006
    everything: Annotated[bool, typer.Option("--all", help="Everything env run mounted on this node")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what running processes use")] = False,
) -> None:
    """Unmount what env run left on targets; what was in them before the first run shows again.

    What other processes use stays, with exit code 73.
    """
    import os
    from pathlib import Path

    from bootseer.env import lock, overlay
    from bootseer.errors import ConfigError, NotFoundError, NotWritableError

    config, _ = _place("")
    state = Path(config.state_dir)
    if everything:
        found = overlay.groups(state, os.getppid())[::-1]
    elif target:
        found = overlay.groups_on([Path(os.path.abspath(item)) for item in target], state, os.getppid())
        if not found:
            raise NotFoundError(f"nothing of bootseer is mounted on {' '.join(target)}")
    else:
        raise ConfigError("no target given", hint="name one with --target, or use --all")
    left = []
    for group in found:
        shown = " ".join(str(item.host) for item in group.record.targets)
        with lock.locked(tuple(group.record.targets), state, wait=_RELEASE_SECONDS), lock.groups_locked(state):
            if not force and (who := group.in_use):
                left.append(f"{shown} ({who})")
                continue
            group.take_down()
        typer.echo(f"released {shown}")
    if left:
        raise NotWritableError(f"still in use: {', '.join(left)}", hint="end that, or release it with --force")


def _spec(
    command: list[str],
    targets: list[str],
    key_files: list[str],
    key_env: list[str],
    salt: str,
    max_age: str,
    restore: str,
    python: str,
    snapshot: bool,
    wait: float,
) -> EnvSpec:
    import os

    from bootseer.env import EnvSpec, Target, parse_age
    from bootseer.errors import ConfigError

    if restore not in ("auto", "mount", "unpack"):
        raise ConfigError(f"--restore {restore} is unknown", hint="use auto, mount or unpack")
    return EnvSpec(
        targets=tuple(Target(os.path.abspath(item)) for item in targets),
        command=tuple(command),
        key_files=tuple(key_files),
        key_env=tuple(key_env),
        salt=salt,
        max_age=parse_age(max_age) if max_age else None,
        python=python,
        restore=restore,  # type: ignore[arg-type]
        caller=os.getppid(),
        snapshot=snapshot,
        wait=wait,
    )


def _place(store: str) -> tuple[Config, str]:
    from bootseer import config

    settings = config.load()
    return settings, store or settings.store_url


def _store(store: str) -> Store:
    from bootseer.store import open_store

    return open_store(_place(store)[1])


def _execute(command: list[str], *, quiet: bool) -> int:
    """Run the command in the foreground; with JSON output its stdout goes to stderr."""
    import subprocess
    import sys

    try:
        done = subprocess.run(command, stdout=sys.stderr if quiet else None, check=False)
    except FileNotFoundError:
        typer.echo(f"bootseer: cannot run {command[0]}: no such command", err=True)
        return 127
    except PermissionError:
        typer.echo(f"bootseer: cannot run {command[0]}: permission denied", err=True)
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
