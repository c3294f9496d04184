"""``bootseer env``: snapshots of what a set-up command makes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._completed import caches, environments, values
from bootseer.cli._shared import (
    AsJson,
    DryRun,
    Group,
    StoreUrl,
    add_verbs,
    age_value,
    answer,
    mistake,
    open_shared,
    print_json,
    settings,
    time_text,
)
from bootseer.units import one_line, size_text

if TYPE_CHECKING:
    from bootseer.config import Config
    from bootseer.env import EnvResult, EnvSpec
    from bootseer.env.manifest import SnapshotManifest
    from bootseer.objects import Store

app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Run a set-up command once per distinct input, restore its result elsewhere"
)

_RESTORES = ("auto", "mount", "unpack")
restoring_for = 0
"""The process that is to have the environment, when this one does no more for it than to restore that."""
_ENDS_ALL = {"slurmstepd", "systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "conmon"}
"""Programs that end what their child has left behind when that ends."""

Key = Annotated[
    str,
    typer.Argument(help="Key, or its first digits; `bootseer store ls` prints them", autocompletion=environments),
]


def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The command, after all options")],
    target: Annotated[list[str], typer.Option("--target", help="Directory the command fills (repeatable)")] = [],  # noqa: B006
    key_file: Annotated[list[str], typer.Option("--key-file", help="File whose content decides the result")] = [],  # noqa: B006
    key_env: Annotated[list[str], typer.Option("--key-env", help="Variable whose value decides the result")] = [],  # noqa: B006
    salt: Annotated[str, typer.Option(help="Any text; another salt is another key")] = "",
    max_age: Annotated[
        float | None,
        typer.Option(
            parser=age_value, metavar="AGE", help="Use no snapshot that is older: 12h, 7d; for unpinned requirements"
        ),
    ] = None,
    restore: Annotated[str, typer.Option(help="auto, mount or unpack", autocompletion=values(*_RESTORES))] = "auto",
    python: Annotated[
        str, typer.Option(help="Interpreter the environment is for; else the command's, or python3 on PATH")
    ] = "",
    wait: Annotated[
        float, typer.Option(min=0, help="Most seconds to wait for another node that runs the command")
    ] = 1800.0,
    beside: Annotated[
        bool,
        typer.Option("--background/--no-background", help="Publish beside what follows the command, or before it ends"),
    ] = True,
    check: Annotated[
        str, typer.Option(metavar="CMD", help="Try the result with CMD: publish and restore only what it is good with")
    ] = "",
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Never run the command: without a snapshot that fits, exit with 66")
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Use no snapshot made before now: run the command, and replace it")
    ] = False,
    snapshot: Annotated[bool, typer.Option("--snapshot/--no-snapshot", help="Use and make snapshots")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only say whether there is a snapshot of it, and why not")
    ] = False,
    cache: Annotated[
        list[str],
        typer.Option(
            "--cache",
            metavar="KIND",
            help="Give CMD the downloads of earlier ones (pip, uv); without --target hand on what it compiles "
            "(inductor, auto, ...)",
            autocompletion=caches,
        ),
    ] = [],  # noqa: B006
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Restore the command's result, or run it and publish what it made. The exit code is the command's.

    It ends with the command: a process of idle priority publishes, and ends with the job. Where nothing would outlive
    the command, as in a step of Slurm of its own, it ends when that is done, as with --no-background.

    With --cache, and without --target, CMD is no set-up command but the program itself, such as a training, and always
    runs: it finds what earlier runs compiled (docs/howto/compile-caches.md), and what it adds is captured.

    With --dry-run nothing is changed: it prints what the key is made of, and whether it is a hit here and now.

    Example: bootseer env run --target /opt/env pip install --target /opt/env -r requirements.txt
    """
    import os
    import time

    from bootseer import env, ranks
    from bootseer.errors import ConfigError
    from bootseer.kernel import background

    background.lend()
    if restoring_for and (not target or cache or dry_run or check or refresh or not snapshot):
        raise env.MissError("that is more than a restore")
    names = _packages(cache, bool(target)) if cache else []
    if cache and not target:
        raise typer.Exit(_cached(command, cache, settings(store), quiet=as_json))
    if not target:
        raise mistake(f"name the folder that the command fills: bootseer env run --target DIR {shlex.join(command)}")
    if frozen and (refresh or not snapshot):
        raise mistake("--frozen wants a snapshot, and --refresh and --no-snapshot use none")
    if restore not in _RESTORES:
        raise ConfigError(f"--restore {restore} is unknown", hint="use auto, mount or unpack")
    spec = env.EnvSpec(
        targets=tuple(env.Target(os.path.abspath(os.path.expanduser(item))) for item in target),
        command=tuple(command),
        key_files=tuple(key_file),
        key_env=tuple(key_env),
        salt=salt,
        max_age=max_age,
        python=python,
        restore=restore,  # type: ignore[arg-type]
        caller=restoring_for or os.getppid(),
        only_restore=restoring_for > 0,
        since=time.time() if refresh else 0.0,
        frozen=frozen,
        snapshot=snapshot,
        background=beside and _outlived(),
        wait=wait,
        nodes=ranks.first(os.environ, ranks.NODES) or 0,
        rank=-1 if (rank := ranks.first(os.environ, ranks.NODE_RANKS)) is None else rank,
    )
    config = settings(store)
    if dry_run:
        _explain(spec, config, as_json)
        return
    try:
        words = shlex.split(check)
    except ValueError as exc:
        raise mistake(f"--check {check!r} is no command: {exc}") from None
    caches = None
    if names:
        from bootseer.env.packagecache import PackageCaches

        caches = PackageCaches(names, spec, (os.geteuid(), os.getegid()), config.store_url, config)
    result = env.run(
        spec,
        lambda: _execute(command, caches.variables if caches else {}, quiet=as_json),
        store_url=config.store_url,
        config=config,
        check=(lambda: _execute(words, {}, quiet=as_json)) if words else None,
        caches=caches,
    )
    _print_result(result, caches.said if caches else "", as_json)
    raise typer.Exit(result.exit_code)


def _packages(cache: list[str], target: bool) -> list[str]:
    """The package caches among those named: for a set-up command these alone, and none for another."""
    from bootseer.env import cachekinds

    if cache == ["auto"]:
        return cachekinds.chosen("auto", "packages") if target else []
    names, others = cachekinds.chosen(cache, "packages"), cachekinds.chosen(cache, "compile")
    if target and others:
        raise mistake(f"--cache {others[0]} is for the program itself, not for a set-up command: leave out --target")
    if names and not target:
        raise mistake(f"--cache {names[0]} is for a set-up command: name the folder that it fills with --target")
    return names


def _cached(command: list[str], names: list[str], config: Config, *, quiet: bool) -> int:
    import os

    from bootseer.launch import caches

    held = caches.of_host("auto" if names == ["auto"] else names, command, config)
    try:
        with held.seen_out():
            held.begin()
            os.environ.update(held.variables(os.environ, str(held.folder)))
            return _execute(command, {}, quiet=quiet)
    finally:
        typer.echo(f"caches: {held.report.how}", err=True)


def _explain(spec: EnvSpec, config: Config, as_json: bool) -> None:
    import msgspec

    from bootseer.env import capture, key, lookup, place
    from bootseer.env.inputs import compared

    spec.check()
    place.check(spec.targets)
    document = key.build(spec, config)
    unpacking = not capture.may_mount(spec)
    look = lookup.look(spec, document, config.store_url, config, place.Held(), unpacking=unpacking)
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
            typer.echo(f"{state:7} {one_line(path)}")
    typer.echo(f"key {look.key}")
    typer.echo("hit" if look.found else look.reason)


def inspect(
    key: Key,
    against: Annotated[
        str, typer.Option("--against", metavar="KEY", help="Say in which inputs and files the snapshot KEY differs")
    ] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Fetch all of it and check every block and file")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Show a snapshot: who made it, and from what. --json prints the whole manifest.

    With --verify the exit code is 65 when it is damaged. A good one that was in quarantine on this node is used again.
    """
    import msgspec

    from bootseer.env import snapshots

    if against and verify:
        raise typer.BadParameter("--against is alone")
    shared = open_shared(store)
    found = snapshots.load(shared, key)
    if against:
        _compare(shared, found, snapshots.load(shared, against), as_json)
        return
    count = _verify(shared, found) if verify else 0
    if as_json:
        print_json(msgspec.to_builtins(found) | ({"ok": True} if verify else {}))
        return
    made = f"{time_text(found.created)} by {found.node} in {found.seconds:.1f} s"
    typer.echo(f"snapshot {found.name}\n  made     {made}")
    typer.echo(f"  command  {one_line(shlex.join(found.document.command))}")
    typer.echo(f"  targets  {one_line(' '.join(found.document.targets))}")
    typer.echo(f"  size     {size_text(found.size)} in {found.entries} entries, {size_text(found.stored)} stored")
    if verify:
        typer.echo(f"  checked  all {count} entries are good")


def _compare(shared: Store, new: SnapshotManifest, old: SnapshotManifest, as_json: bool) -> None:
    from bootseer.env import snapshots
    from bootseer.env.explain import changes, entry_changes, input_changes

    inputs = changes(old.document, new.document) + input_changes(old.inputs, new.inputs)
    entries = entry_changes(snapshots.entries(shared, old), snapshots.entries(shared, new))
    lines = [*inputs, *(f"{sign} {path}" for sign, path in entries)]
    answer({"inputs": inputs, "files": entries}, as_json, *lines)


def _verify(shared: Store, found: SnapshotManifest) -> int:
    import tempfile
    from pathlib import Path

    from rich.console import Console

    from bootseer.env import quarantine, snapshots
    from bootseer.folders import private_folder

    base = private_folder(Path(settings().cache_dir))
    with Console(stderr=True).status(f"verifying {found.key[:12]}"), tempfile.TemporaryDirectory(dir=base) as work:
        count = snapshots.verify(shared, found, Path(work))
    quarantine.lift(base, quarantine.mark_of(found))
    return count


def export(
    key: Key,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="oci-layer (says also what the command deleted), or tar",
            autocompletion=values("oci-layer", "tar"),
        ),
    ] = "oci-layer",
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is stdout")] = "-",
    store: StoreUrl = "",
) -> None:
    """Write a snapshot as a tar file, such as a layer to add to the image. The same snapshot gives the same bytes.

    All of it is verified before the first byte is written. An image and this layer are the image with its environment.
    """
    import sys
    import tempfile
    from pathlib import Path

    from bootseer.env import export, manifest, snapshots
    from bootseer.errors import doing
    from bootseer.folders import private_folder
    from bootseer.objects import signature
    from bootseer.stripefs.localcopy import replaced

    if form not in ("oci-layer", "tar"):
        raise mistake(f"--format {form} is unknown: use oci-layer or tar")
    shared, config = open_shared(store), settings(store)
    found = snapshots.load(shared, key)
    manifest.check_signed(found, signature.trusted_keys(config))
    base = private_folder(Path(config.cache_dir))
    with tempfile.TemporaryDirectory(dir=base) as work, doing(f"write {output}"):
        if output == "-":
            export.export(shared, found, form, Path(work), sys.stdout.buffer)  # type: ignore[arg-type]
            sys.stdout.buffer.flush()
            return
        with replaced(Path(output)) as file:
            export.export(shared, found, form, Path(work), file)  # type: ignore[arg-type]


def rm(
    keys: Annotated[
        list[str],
        typer.Argument(metavar="KEY...", help="Keys, or their first digits", autocompletion=environments),
    ],
    dry_run: DryRun = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Remove snapshots from the store: the next start runs the command. What is mounted goes on.

    Blocks stay in the store, because images and other snapshots may have them in common.
    """
    from bootseer.env import snapshots

    shared = open_shared(store)
    names = [snapshots.resolve(shared, key) for key in keys]
    if not dry_run:
        snapshots.remove(shared, names)
    removed_snapshots(names, dry_run, as_json)


def removed_snapshots(names: list[str], dry_run: bool, as_json: bool) -> None:
    lines = [f"{'would remove' if dry_run else 'removed'} snapshot {name[:12]}" for name in names]
    answer({"dry_run": dry_run, "removed": [{"key": name} for name in names]}, as_json, *lines)


def _outlived() -> bool:
    """Whether processes that this one leaves go on: not those of a container that it is the first of, or of a step or a
    service."""
    import os
    from pathlib import Path

    if os.getpid() == 1 or not os.getppid():
        return False
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() not in _ENDS_ALL
    except OSError:
        return True


def _execute(command: list[str], variables: dict[str, str], *, quiet: bool) -> int:
    """Run the command in the foreground with these variables, too; with JSON output its stdout goes to stderr."""
    import os
    import subprocess
    import sys

    try:
        environ = {**os.environ, **variables}
        done = subprocess.run(command, env=environ, stdout=sys.stderr if quiet else None, check=False)
    except FileNotFoundError:
        typer.echo(f"bootseer: cannot run {command[0]}: no such command", err=True)
        return 127
    except OSError as exc:
        typer.echo(f"bootseer: cannot run {command[0]}: {exc.strerror}", err=True)
        return 126
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _print_result(result: EnvResult, caches: str, as_json: bool) -> None:
    if as_json:
        answer = {
            "outcome": result.outcome,
            "reason": result.reason,
            "exit_code": result.exit_code,
            "seconds": round(result.seconds, 6),
            "key": result.key,
            "timings": result.timings,
            "caches": caches,
        }
        print_json(answer)
        return
    steps = ", ".join(f"{name} {_seconds(value)}" for name, value in result.timings.items())
    steps += f"; package caches {caches}" if caches else ""
    typer.echo(f"env: {result.outcome.value} ({result.reason}), key {result.key[:12]}; {steps}", err=True)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


add_verbs(app, {"Run": (run,), "Snapshots of a store": (inspect, export, rm)})
