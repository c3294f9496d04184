"""``bootseer env``: snapshots of what a set-up command makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bootseer.config import Config
    from bootseer.env import EnvResult, EnvSpec
    from bootseer.env.manifest import SnapshotManifest
    from bootseer.store import Store

app = typer.Typer(
    no_args_is_help=True, help="Run a set-up command once per distinct input, restore its result elsewhere"
)

Targets = Annotated[list[str], typer.Option("--target", help="Directory the command fills (repeatable)")]
KeyFiles = Annotated[list[str], typer.Option("--key-file", help="File whose content decides the result")]
KeyEnv = Annotated[list[str], typer.Option("--key-env", help="Variable whose value decides the result")]
Salt = Annotated[str, typer.Option(help="Any text; another salt is another key")]
MaxAge = Annotated[str, typer.Option(help="Do not use older snapshots, e.g. 7d; for unpinned requirements")]
StoreUrl = Annotated[str, typer.Option("--store", help="Where snapshots live; else as configured")]
Restore = Annotated[str, typer.Option(help="auto, mount or unpack")]
Python = Annotated[str, typer.Option(help="Interpreter the environment is for; else python3 on PATH")]
Json = Annotated[bool, typer.Option("--json", help="Machine output")]
Command = Annotated[list[str], typer.Argument(help="The command, after --")]
Key = Annotated[str, typer.Argument(help="Key, or its first digits")]


@app.command()
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
    wait: Annotated[float, typer.Option(help="Seconds to wait for another node that runs the command already")] = 0.0,
    snapshot: Annotated[bool, typer.Option("--snapshot/--no-snapshot", help="Use and make snapshots")] = True,
    as_json: Json = False,
) -> None:
    """Restore the command's result, or run it and publish what it made. The exit code is the command's."""
    from bootseer import env

    spec = _spec(command, target, key_file, key_env, salt, max_age, restore, python, snapshot, wait)
    config, url = _place(store)
    result = env.run(spec, lambda: _execute(command, quiet=as_json), store_url=url, config=config)
    _print_result(result, as_json)
    raise typer.Exit(result.exit_code)


@app.command()
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
    as_json: Json = False,
) -> None:
    """Print the key document, whether it is a hit here and now, and why not. Changes nothing."""
    import json

    import msgspec

    from bootseer.env import capture, lookup

    spec = _spec(command, target, key_file, key_env, salt, max_age, restore, python, True, 0.0)
    spec.check()
    config, url = _place(store)
    document = lookup.document(spec, config)
    unpacking = spec.restore == "unpack" or not capture.may_mount(spec)
    look = lookup.look(spec, document, url, config, unpacking=unpacking)
    shown = msgspec.to_builtins(document)
    if as_json:
        answer = {"key": look.key, "hit": look.found is not None, "reason": look.reason, "document": shown}
        typer.echo(json.dumps(answer, indent=2))
        return
    for entry in shown["files"].values():
        entry.pop("text")
    typer.echo(json.dumps(shown, indent=2))
    typer.echo(f"key {look.key}")
    typer.echo("hit" if look.found else look.reason)


@app.command()
def ls(store: StoreUrl = "", as_json: Json = False) -> None:
    """List the snapshots in the store, newest first."""
    import json
    import sys
    import time

    from rich.console import Console
    from rich.table import Table

    from bootseer.errors import BootseerError

    found = []
    shared = _store(store)
    for info in shared.list("env"):
        name = info.key.removeprefix("env/").removesuffix(".json")
        if "/" in name:
            continue
        try:
            found.append(_manifest(shared, name))
        except BootseerError as exc:
            typer.echo(f"bootseer: {exc}", err=True)
    found.sort(key=lambda item: -item.created)
    if as_json:
        typer.echo(json.dumps([_brief(item) for item in found], indent=2))
        return
    table = Table("key", "made", "by", "size", "stored", "entries", "took", "targets", box=None)
    for column in table.columns:
        column.no_wrap = True
    for item in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(item.created))
        sizes = (f"{item.size / 1e6:.1f} MB", f"{item.stored / 1e6:.1f} MB", str(item.entries), f"{item.seconds:.1f} s")
        table.add_row(item.key[:12], when, item.node, *sizes, " ".join(item.document.targets))
    # one line each: wide when it goes into a pipe, cut off at the right on a terminal
    Console(width=None if sys.stdout.isatty() else 400).print(table, no_wrap=True)


@app.command()
def inspect(
    key: Key, store: StoreUrl = "", files: Annotated[bool, typer.Option(help="List entries too")] = False
) -> None:
    """Print a snapshot's manifest as JSON; with --files also its inventory."""
    import json

    import msgspec

    shared = _store(store)
    found = _manifest(shared, _resolve(shared, key))
    answer = msgspec.to_builtins(found)
    if files:
        from bootseer.env import snapshots

        answer["files"] = [[e.kind, oct(e.mode), e.size, e.path] for e in snapshots.entries(shared, found)]
    typer.echo(json.dumps(answer, indent=2))


@app.command()
def diff(first: Key, second: Key, store: StoreUrl = "", as_json: Json = False) -> None:
    """Say in which inputs and in which files two snapshots differ."""
    import json

    from bootseer.env import snapshots
    from bootseer.env.explain import changes, entry_changes

    shared = _store(store)
    old, new = (_manifest(shared, _resolve(shared, key)) for key in (first, second))
    inputs = changes(old.document, new.document)
    entries = entry_changes(snapshots.entries(shared, old), snapshots.entries(shared, new))
    if as_json:
        typer.echo(json.dumps({"inputs": inputs, "files": entries}, indent=2))
        return
    for line in inputs:
        typer.echo(line)
    for sign, path in entries:
        typer.echo(f"{sign} {path}")


@app.command()
def verify(key: Key, store: StoreUrl = "", as_json: Json = False) -> None:
    """Fetch a whole snapshot and check every block and every file of it. Exit code 65 when it is damaged."""
    import json
    import tempfile
    from pathlib import Path

    from rich.console import Console

    from bootseer.env import snapshots

    shared = _store(store)
    found = _manifest(shared, _resolve(shared, key))
    config, _ = _place(store)
    base = Path(config.cache_dir)
    base.mkdir(parents=True, exist_ok=True)
    with Console(stderr=True).status(f"verifying {found.key[:12]}"), tempfile.TemporaryDirectory(dir=base) as work:
        count = snapshots.verify(shared, found, Path(work))
    answer = {"key": found.key, "entries": count, "size": found.size, "good": True}
    typer.echo(json.dumps(answer) if as_json else f"snapshot {found.key[:12]} is good: {count} entries")


@app.command()
def release(
    target: Annotated[list[str], typer.Option("--target", help="Directory under an overlay of env run")] = [],  # noqa: B006
    everything: Annotated[bool, typer.Option("--all", help="Everything env run mounted on this node")] = False,
) -> None:
    """Unmount what env run left on targets; what was in them before the first run shows again."""
    import os
    from pathlib import Path

    from bootseer.env import overlay
    from bootseer.errors import ConfigError, NotFoundError

    config, _ = _place("")
    state = Path(config.state_dir)
    if everything:
        found = overlay.groups(state)[::-1]
    elif target:
        found = overlay.groups_on([Path(os.path.abspath(item)) for item in target], state)
        if not found:
            raise NotFoundError(f"nothing of bootseer is mounted on {' '.join(target)}")
    else:
        raise ConfigError("no target given", hint="name one with --target, or use --all")
    for group in found:
        group.unmount()
        typer.echo(f"released {' '.join(str(item.host) for item in group.record.targets)}")


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


def _manifest(store: Store, key: str) -> SnapshotManifest:
    from bootseer.env import manifest

    return manifest.decode(store.get(manifest.manifest_key(key)), key)


def _resolve(store: Store, key: str) -> str:
    from bootseer.env import snapshots

    return snapshots.resolve(store, key)


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
    import json

    if as_json:
        answer = {
            "outcome": result.outcome.value,
            "reason": result.reason,
            "exit_code": result.exit_code,
            "seconds": round(result.seconds, 6),
            "key": result.key,
            "timings": result.timings,
        }
        typer.echo(json.dumps(answer))
        return
    steps = ", ".join(f"{name} {_seconds(value)}" for name, value in result.timings.items())
    typer.echo(f"env: {result.outcome.value} ({result.reason}), key {result.key[:12]}; {steps}", err=True)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
