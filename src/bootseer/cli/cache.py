"""``bootseer cache``: the chunks of images, environments and striped files on this node's disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import (
    AsJson,
    Bars,
    DryRun,
    Group,
    StoreUrl,
    add_verbs,
    answer,
    open_shared,
    print_json,
    print_table,
    settings,
    time_text,
    understood,
)
from bootseer.errors import ConfigError, DataError, NotFoundError
from bootseer.folders import trusted
from bootseer.units import count_text, one_line, parse_size, size_text

if TYPE_CHECKING:
    from bootseer.chunks.check import Check
    from bootseer.chunks.eviction import Gone
    from bootseer.chunks.inventory import Part

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="The node cache: what of images, environments and striped files is on this node's disk",
)

_PATIENCE = 30.0
_decimal = understood(partial(parse_size, kilo=1000))


def ls(as_json: AsJson = False) -> None:
    """List the trees and striped files in the cache, longest unused first."""
    from bootseer.chunks import inventory

    cache = _cache()
    found = inventory.parts(cache)
    extra = {name: inventory.disk_bytes([cache / name]) for name in ("overlays", "work")}
    if as_json:
        print_json(found)
        return
    names = ("tree or file", "on disk", "blocks", "hot", "last use", "in use by")
    total = f"{cache}: {size_text(inventory.used(cache))}"
    print_table(total, names, (_row(part) for part in found), left=("tree or file", "in use by"))
    for name, size in extra.items():
        if size:
            typer.echo(f"besides, {cache / name}: {size_text(size)}, which goes by itself")


def gc(
    to: Annotated[
        int | None, typer.Option("--to", parser=_decimal, metavar="SIZE", help="Size to come down to, such as 50G")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Whatever is not in use")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give disk space back: cold blocks first, then whole trees, longest unused first; nothing that is in use.

    Without --to or --all only what the limits in the settings ask for (cache_limit, cache_keep_free).
    There is no --age here: a cached block never grows too old, it goes when room is needed (--age is of store gc,
    fs gc).

    Example: bootseer cache gc --to 50G --dry-run
    """
    from bootseer.chunks import eviction, inventory

    if to is not None and everything:
        raise ConfigError("--to and --all contradict each other")
    cache, config = _cache(), settings()
    before = inventory.used(cache)
    if everything:
        need = before + 1
    elif to is not None:
        need = before - to
    else:
        need = eviction.Limits(config.cache_limit, config.cache_keep_free).excess(cache)
    done = eviction.Collection()
    if need > 0:
        done = eviction.collect(cache, need, dry_run=dry_run, patience=_PATIENCE, whole=everything)
    if as_json:
        print_json({"dry_run": dry_run, "removed": done.gone, "bytes": done.bytes, "before": before, "busy": done.busy})
        return
    would = "would give back" if dry_run else "gave back"
    for one in done.gone:
        what = "all" if one.whole else count_text(one.blocks, "cold block", "cold blocks")
        typer.echo(f"{would} {size_text(one.bytes):>9}: {what} of {_name(one)}")
    if done.busy:
        typer.echo("another process is making room")
    elif done.bytes < need <= before:
        typer.echo(f"{size_text(need - done.bytes)} more were wanted, but the rest is in use")
    typer.echo(f"{would} {size_text(done.bytes)} of {size_text(before)}")


def verify(
    tree: Annotated[str, typer.Argument(metavar="[TREE]", help="First digits of its digest (default: all)")] = "",
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged, so that it is fetched again")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Read every block in the cache and compare it with its hash; exit code 65 when damage is left.

    With --repair and --store damaged blocks are fetched again at once. Mounted trees are checked, but not changed.
    """
    from bootseer.blocks.fetch.prefetch import fetch_all
    from bootseer.chunks import check, inventory

    cache = _cache()
    found = [part for part in inventory.parts(cache) if not tree or any(one.startswith(tree) for one in part.trees)]
    if tree and not found:
        raise NotFoundError(f"no tree {tree} is in the cache {cache}", hint="bootseer cache ls lists them")
    fetch = partial(fetch_all, open_shared(store)) if store and repair else None
    checks = []
    with Bars(quiet=as_json) as bars:
        for part in found:
            name = _name(part)
            progress = partial(bars.update, name)
            checks.append(check.check(cache, part, repair=repair, fetch=fetch, progress=progress))
    left = [one for one in checks if one.damaged]
    answer({"ok": not left, "trees": checks}, as_json, *(line for one in checks for line in _lines(one)))
    if left:
        blocks = count_text(sum(len(one.bad) - one.dropped for one in left), "block", "blocks")
        files = count_text(sum(len(one.bad_files) - one.dropped_files for one in left), "file", "files")
        hint = "unmount what uses them and run again with --repair" if repair else "run again with --repair"
        raise DataError(f"{blocks} and {files} in the cache {cache} are damaged", hint=hint)


def _cache() -> Path:
    return trusted(Path(settings().cache_dir))  # what others put there would lead elsewhere


def _name(one: Part | Gone | Check) -> str:
    if one.file:
        return f"{one_line(one.file)} ({one.map[:12]})"
    return " ".join(digest[:12] for digest in one.trees) or f"({one.map[:12]})"


def _row(part: Part) -> tuple[str, ...]:
    hot = "" if part.hot_total is None else f"{part.hot_ready}/{part.hot_total}"
    users = [*part.mounts, *([f"process {part.owner}"] if part.owner and not part.mounts else [])]
    return (
        _name(part),
        size_text(part.disk_bytes),
        f"{part.blocks_ready}/{part.blocks_total}",
        hot,
        time_text(part.last_use),
        " ".join(users),
    )


def _lines(one: Check) -> list[str]:
    name = _name(one)
    if one.trouble:
        return [f"{name}: not checked: {one.trouble}"]
    text = f"{name}: {count_text(one.checked, 'block', 'blocks')} checked"
    if one.bad:
        text += f", {len(one.bad)} damaged, {one.dropped} dropped, {one.fetched} fetched again"
    if one.in_use:
        text += ", in use"
    return [text, *(f"  damaged: {path}" for path in one.bad_files)]


add_verbs(app, {"Commands": (ls, gc, verify)})
