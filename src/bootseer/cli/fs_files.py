"""``bootseer fs put|get|cp|ls|inspect|mv|rm``: files of a striped store."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from bootseer.cli._fs import Unit, Url, Width, files_text, inside, place, place_both, row, size_value
from bootseer.cli._shared import AsJson, Bars, DryRun, answer, print_json
from bootseer.units import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bootseer.stripefs.copy import Copied

Shape = Annotated[int, typer.Option(metavar="N", help="Stripe width of the copies", show_default="as the source")]
ShapeUnit = Annotated[
    int, typer.Option(parser=size_value, metavar="SIZE", help="Stripe unit of the copies", show_default="as the source")
]

Force = Annotated[bool, typer.Option("--force", help="Also into a checkpoint that has a COMMIT: that breaks it")]
Moved = Annotated[bool, typer.Option("--force", help="Also out of or into a checkpoint with COMMIT: that breaks it")]


def put(
    local: Annotated[Path, typer.Argument(help="A file, or a folder to copy with all its files")],
    url: Url,
    width: Width = 4,
    unit: Unit = 1 << 20,
    commit: Annotated[bool, typer.Option("--commit", help="Publish the folder as a checkpoint at the end")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Store a file, or every file of a folder; each appears whole or not at all.

    A file goes to URL itself, or into it when URL ends with a slash or is a folder.

    Example: bootseer fs put ckpt/ hdfs://namenode:8020/run/step-200 --commit
    """
    from bootseer.errors import ConfigError, DataError, NotFoundError
    from bootseer.stripefs import trees
    from bootseer.stripefs.checkpoint.commit import NAME as COMMIT
    from bootseer.stripefs.layout import check_shape, clean_new

    check_shape(width, unit)
    if not local.exists():
        raise NotFoundError(f"no file or folder {local}")
    if not local.is_dir() and not local.is_file():
        raise ConfigError(f"{local} is neither a file nor a folder")
    fs, path = place(url)
    saving = None
    files = sorted(file for file in local.rglob("*") if file.is_file()) if local.is_dir() else [local]
    for file in files:
        clean_new("/".join((path, *file.relative_to(local).parts)))
    if commit:
        if not local.is_dir():
            raise ConfigError("--commit publishes a folder, and this is a file", hint="leave --commit away")
        if not files:
            raise DataError(f"{local} has no files to commit")
        if (local / COMMIT).exists():
            raise ConfigError(f"{local} has a file {COMMIT}, the name of the manifest", hint="rename it")
        saving = fs.save(path)
    elif not local.is_dir():
        path = inside(fs, path, url, local.name)
    if not commit and not force:
        fs.refuse_committed(path)
    stored: dict[str, dict[str, object]] = {}
    before = (lambda _pointer: saving.check()) if saving else None
    with Bars(quiet=as_json) as bars:
        to_put = [(file, file.stat().st_size) for file in files]
        for target, written in trees.put(
            fs, local, to_put, path, width=width, unit=unit, progress=bars.update, before=before
        ):
            found = {"path": target, "size": written.size, "digest": written.digest, "striped": bool(written.uuid)}
            stored[target] = found
    made = saving.commit() if saving else None
    size = sum(file.stat().st_size for file in files) if made is None else made.size
    line = f"{url}: {files_text(len(stored), size)} {'committed' if made else 'stored'}"
    answer({"url": url, "files": [stored[to] for to in sorted(stored)], "committed": commit}, as_json, line)


def get(
    url: Url,
    local: Annotated[Path, typer.Argument(help="File to write; or folder, when URL is a folder")],
    as_json: AsJson = False,
) -> None:
    """Copy a file (or folder) from the store, every byte checked; a file appears whole or not at all."""
    from bootseer.stripefs import localcopy, locate, trees
    from bootseer.stripefs.checkpoint.commit import is_manifest

    locate(local)  # a URL is none of a file here
    fs, path = place(url)
    copied: dict[str, tuple[Path, int]] = {}
    with Bars(quiet=as_json) as bars:
        if fs.stat(path).is_dir:
            for name in fs.files(path):
                if is_manifest(fs.backend, name):
                    fs.checkpoint(name.rpartition("/")[0])  # else a file that is missing would not be missed
            for name, target, got in trees.get(fs, path, local, progress=bars.update):
                copied[name] = target, got
        else:
            target = local / path.rpartition("/")[2] if os.path.isdir(local) else local
            localcopy.folder(target.parent)
            localcopy.refuse_folder(target)
            copied[path] = target, fs.get(path, target, progress=lambda done, total: bars.update(path, done, total))
    rows = [{"path": str(copied[name][0]), "size": copied[name][1]} for name in sorted(copied)]
    size = sum(got for _, got in copied.values())
    answer({"url": url, "files": rows}, as_json, f"{local}: {files_text(len(rows), size)} copied")


def cp(
    source: Annotated[str, typer.Argument(metavar="URL", help="File or folder to copy, plain or striped")],
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="URL of the copy, in any store; with --stripe: in place")
    ] = None,
    stripe: Annotated[bool, typer.Option("--stripe", help="Make plain files striped; run again, it goes on")] = False,
    width: Shape = 0,
    unit: ShapeUnit = 0,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify", help="Read each copy back before it appears", show_default="with --stripe"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave copies that have the same content")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Copy a file or folder within or between stores: real copies, with stripes of their own.

    A checkpoint is a checkpoint again: the copy gets its COMMIT last. With --stripe plain files get stripes. Without a
    TARGET each is replaced in one step, unless somebody changes it meanwhile. Files below 4 MiB stay plain.
    """
    from bootseer.errors import ConfigError
    from bootseer.stripefs.copy import copy_tree
    from bootseer.stripefs.layout import check_shape

    if stripe:
        width, unit, resume = width or 4, unit or 1 << 20, True
        check_shape(width, unit)
    elif target is None:
        raise typer.BadParameter("name a TARGET, or say --stripe to make the files striped in place")
    src, path, dst, there = place_both(source, target or source)
    if target and not src.stat(path).is_dir:
        there = inside(dst, there, target, path.rpartition("/")[2])
    if src.url == dst.url and path == there and not stripe:
        raise ConfigError("source and target are the same", hint="--stripe makes a file striped in place")
    with Bars(quiet=as_json) as bars:
        flags = {"verify": stripe if verify is None else verify, "resume": resume, "force": force}
        made = copy_tree(src, path, dst, there, width=width, unit=unit, progress=bars.update, **flags)
    _print_copied(target or source, made, "copied" if target else "striped", as_json)


def _print_copied(url: str, made: Sequence[Copied], what: str, as_json: bool) -> None:
    if as_json:
        print_json({"url": url, "files": made})
        return
    new = [copied for copied in made if not copied.skipped]
    typer.echo(f"{url}: {files_text(len(new), sum(copied.size for copied in new))} {what}")
    for why in sorted({copied.skipped for copied in made} - {""}):
        same = [copied for copied in made if copied.skipped == why]
        typer.echo(f"{files_text(len(same), sum(copied.size for copied in same))} left alone: {why}")


def ls(
    url: Url,
    latest: Annotated[
        bool, typer.Option("--latest", help="Only print the URL of the newest complete checkpoint in the folder")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List a folder. Sizes are those of the contents."""
    fs, path = place(url)
    if latest:
        newest = fs.latest(path)
        full = f"{fs.url.rstrip('/')}/{newest}"
        answer({"path": newest, "url": full}, as_json, full)
        return
    found = fs.ls(path)
    if as_json:
        print_json([row(stat) for stat in found])
        return
    for stat in found:
        kind = "folder" if stat.is_dir else f"{stat.width} x {stat.unit}" if stat.striped else "plain"
        name = one_line(stat.path.rpartition("/")[2])
        typer.echo(f"{stat.size:>15} {kind:>14}  {name}{'/' if stat.is_dir else ''}")


def inspect(
    url: Annotated[str, typer.Argument(metavar="URL|DIR", help="File or folder of a store, or DIR of `fs mount`")],
    as_json: AsJson = False,
) -> None:
    """Show what is known of a file, whether a folder is a complete checkpoint, or what a mount has moved."""
    import msgspec

    from bootseer.errors import DataError
    from bootseer.fsmount.client import find

    if "://" not in url and (mounted := find(Path(url))):
        found = msgspec.to_builtins(mounted.status())
        answer(found, as_json, *(f"{key:>18}: {value}" for key, value in found.items()))
        return
    fs, path = place(url)
    found = row(fs.stat(path))
    if found["is_dir"]:
        try:
            manifest = fs.checkpoint(path)
            found |= {"checkpoint": "complete", "files": len(manifest.files), "size": manifest.size}
        except DataError as exc:
            found["checkpoint"] = exc.message
    if as_json:
        print_json(found)
        return
    if mtime := cast(float, found["mtime"]):  # the folders of an object store have none
        found["mtime"] = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(mtime))
    for key, value in found.items():
        if value not in ("", 0):
            typer.echo(one_line(f"{key:>11}: {value}"))


def commit(
    url: Url,
    as_json: AsJson = False,
) -> None:
    """Publish the folder at URL as a complete checkpoint. The first commit wins.

    Writes into the folder that are under way are ended.
    """
    fs, path = place(url)
    made = fs.commit(path)
    answer(made, as_json, f"{url}: {files_text(len(made.files), made.size)} committed")


def mv(
    source: Annotated[str, typer.Argument(metavar="URL", help="File or folder to rename")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New URL, in the same store")],
    force: Moved = False,
    as_json: AsJson = False,
) -> None:
    """Rename a file or folder in one step. A striped file that changes its folder is copied and then removed.

    A whole checkpoint folder can be renamed. What a COMMIT names stays in it, and nothing is moved in (exit code 73).
    """
    from bootseer.errors import ConfigError

    src, path, dst, there = place_both(source, target)
    if src.url != dst.url:
        raise ConfigError("mv renames within one storage", hint="use `bootseer fs cp`, then `bootseer fs rm`")
    src.stat(path)
    there = inside(dst, there, target, path.rpartition("/")[2])
    src.rename(path, there, force=force)
    answer({"url": source, "path": there}, as_json)


def rm(
    url: Url,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="A folder with everything in it")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also what a COMMIT names: that breaks the checkpoint")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove a file with its stripes, or a folder; it vanishes in one step.

    A whole checkpoint folder goes COMMIT first. What a COMMIT names is not removed alone (exit code 73).
    """
    from bootseer.errors import ConfigError

    fs, path = place(url)
    if not path:
        raise ConfigError(f"{url} is the root of a storage", hint="name a file or folder in it")
    if (is_dir := fs.stat(path).is_dir) and not recursive:
        raise ConfigError(f"{url} is a folder", hint="remove it with --recursive")
    names, lines = fs.files(path), list[str]()
    if dry_run:
        lines = [f"would remove {one_line(name)}" for name in names]
    elif is_dir:
        fs.remove_tree(path, force=force)
    else:
        fs.remove(path, force=force)
    answer({"dry_run": dry_run, "removed": [{"path": name} for name in names]}, as_json, *lines)
