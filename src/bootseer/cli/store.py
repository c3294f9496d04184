"""``bootseer store``: the images and environments of a store, and what they take of it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from bootseer.cli._shared import (
    AsJson,
    DryRun,
    Group,
    Limit,
    StoreUrl,
    add_verbs,
    age_value,
    answer,
    mistake,
    notice,
    open_shared,
    print_json,
    print_table,
    settings,
    time_text,
)
from bootseer.cli.env import removed_snapshots
from bootseer.units import size_text

app = typer.Typer(cls=Group, no_args_is_help=True, help="What images and environments have put into a store")

_LEAST_GRACE = 86_400.0
_EMPTY = "nothing is in store {} yet: bootseer image convert and bootseer env run fill it"
_KINDS = {
    "images": "records of images",
    "env": "records of environments",
    "trees": "manifests of trees",
    "blobs": "data, shared by images and environments",
    "profiles": "recorded starts and hot packs",
    "checkpoints": "what starts read of checkpoints",
    "leases": "leases of work that one node does",
    "uses": "notes of nodes that use a tree",
    "published": "trees that were published by themselves",
    "collection": "what store gc has withdrawn, and its notes",
}


def init(
    group: Annotated[str, typer.Argument(metavar="[GROUP]", help="With --shared (default: your own group)")] = "",
    shared: Annotated[bool, typer.Option("--shared", help="All of GROUP may write to it, and nobody else")] = False,
    store: StoreUrl = "",
) -> None:
    """Make a folder a store that several users write to, also one that is in use already.

    Without it a folder serves the user who wrote to it first: others read it, and run their set-up commands again.

    Example: bootseer store init --shared research --store /shared/store
    """
    import grp

    from bootseer.objects import open_store
    from bootseer.objects.folder import FolderStore

    place = open_store(settings(store).store_url)
    if not isinstance(place, FolderStore):
        raise mistake(f"{place.shown} is no folder: who may write there is said where it is kept")
    if not shared:
        raise mistake("name who is to write there: bootseer store init --shared GROUP")
    try:
        gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid if group else os.getegid()
    except KeyError:
        raise mistake(f"there is no group {group!r} on this machine") from None
    if gid == 0:
        raise mistake("the group of root is nobody else's: name the group of those who start jobs")
    place.share(gid)
    answer(None, False, f"{place.shown}: group {group or gid} may write to it")


def ls(store: StoreUrl = "", limit: Limit = 0, as_json: AsJson = False) -> None:
    """List the images and environments of a store; environments newest first."""
    from bootseer import image
    from bootseer.env import snapshots

    shared = open_shared(store)
    images, found = list(image.records(shared)), snapshots.everything(shared)
    images, found = images[: limit or None], found[: limit or None]
    if as_json:
        print_json({"images": images, "environments": [snapshots.summary(item) for item in found]})
        return
    if images:
        rows = [
            (one.image[7:19], one.platform, size_text(one.tree_bytes), size_text(one.stored_bytes), one.reference)
            for one in images
        ]
        columns = ("image", "platform", "size", "stored", "converted from")
        print_table("images", columns, rows, left=("image", "platform", "converted from"))
    if found:
        made = [
            (item.shown, time_text(item.created), item.node, size_text(item.size), size_text(item.stored),
             str(item.entries), f"{item.seconds:.1f} s", " ".join(item.document.targets))
            for item in found
        ]  # fmt: skip
        names = ("key", "made", "by", "size", "stored", "entries", "took", "targets")
        print_table("environments", names, made, left=("key", "made", "by", "targets"))
    if not images and not found:
        notice(_EMPTY.format(shared.shown))


def du(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Say how many bytes a store has of each kind and age, and what each image and environment takes of them.

    All objects are listed, which takes a while. ``alone`` is what would go with it, ``all`` what it shares included.
    """
    from bootseer.upkeep import account

    shared = open_shared(store)
    found = account.take(shared)
    if as_json:
        print_json(found)
        return
    if not found.kinds:
        notice(_EMPTY.format(shared.shown))
        return
    rows = [
        (kind, size_text(one.bytes), str(one.objects), size_text(one.month), _KINDS.get(kind, ""))
        for kind, one in sorted(found.kinds.items())
    ]
    print_table("", ("kind", "bytes", "objects", "older than 30 days", "what"), rows, left=("kind", "what"))
    takers = [
        (one.kind, one.name[:25] if one.kind == "environment" else one.name, size_text(one.alone), size_text(one.all),
         time_text(one.made) if one.made else "", time_text(one.used) if one.used else "")
        for one in found.takers
    ]  # fmt: skip
    if takers:
        print_table("", ("for", "name", "alone", "all", "made", "last used"), takers, left=("for", "name"))
    if found.why:
        notice(found.why)


def gc(
    age: Annotated[
        float | None,
        typer.Option(parser=age_value, metavar="AGE", help="First remove environments not used for longer: 12h, 30d"),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            parser=age_value, metavar="AGE", help="Delete what nothing has needed for longer: 1d at least (default: 3d)"
        ),
    ] = None,
    dry_run: DryRun = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Give space of a store back: delete what no image, no environment and no mount needs any more.

    What is not needed is condemned first; a later call deletes it after the grace time. Run it daily or weekly.

    Example: bootseer store gc --age 30d --dry-run
    """
    from bootseer.env import snapshots
    from bootseer.upkeep import collection

    if grace is not None and grace < _LEAST_GRACE:
        raise mistake("--grace is at least 1d: nodes note twice a day what they use")
    os.umask(0o022)  # who reads must be able to read what is withdrawn
    shared, names = open_shared(store), list[str]()
    if age is not None:
        names = [root.name for root in collection.unused(shared, age, dry_run=dry_run)]
        if not dry_run:
            snapshots.remove(shared, names)
    if not shared.dated and age is not None:
        notice(f"{shared.shown} is a registry: its own garbage collection gives the space back")
        removed_snapshots(names, dry_run, as_json)
        return
    done = collection.collect(shared, grace=grace or collection.GRACE, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "environments": names, "collected": done})
        return
    word = "would remove" if dry_run else "removed"
    lines = [f"{word} snapshot {name[:12]}" for name in names]
    lines += [f"{word} {one.objects} objects of {kind}, {size_text(one.bytes)}" for kind, one in done.removed.items()]
    answer(None, False, *lines)
    for what, fate in (done.condemned, "not needed, and go later"), (done.held, "kept only by nodes that use them"):
        if what.objects:
            notice(f"{what.objects} objects, {size_text(what.bytes)}, are {fate}")
    if not lines:
        notice("nothing is to be removed now")


add_verbs(app, {"Commands": (init, ls, du, gc)})
