"""``bootseer store``: the images and environments of a store, and what they take of it."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Annotated

import typer

from bootseer.cli._shared import (
    AsJson,
    DryRun,
    Group,
    Limit,
    StoreUrl,
    Verb,
    age_value,
    answer_table,
    notice,
    open_shared,
    print_json,
    print_table,
    time_text,
)
from bootseer.cli.env import removed_snapshots
from bootseer.units import size_text

app = typer.Typer(cls=Group, no_args_is_help=True, help="What images and environments have put into a store")

_KINDS = {
    "images": "records of images",
    "env": "records of environments",
    "trees": "manifests of trees",
    "blobs": "data, shared by images and environments",
    "profiles": "recorded starts and hot packs",
    "checkpoints": "what starts read of checkpoints",
    "leases": "leases of work that one node does",
}


@app.command(cls=Verb)
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
        notice(f"nothing is in store {shared.shown} yet: bootseer image convert and bootseer env run fill it")


@app.command(cls=Verb)
def du(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Say how many objects and bytes a store has of each kind. All of them are listed, which takes a while."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for info in open_shared(store).list(""):
        row = sums[info.key.partition("/")[0]]
        row[0] += 1
        row[1] += info.size
    found = [{"kind": kind, "objects": row[0], "bytes": row[1]} for kind, row in sorted(sums.items())]
    rows = [(kind, size_text(row[1]), str(row[0]), _KINDS.get(kind, "")) for kind, row in sorted(sums.items())]
    answer_table(found, as_json, ("kind", "bytes", "objects", "what"), rows, ("kind", "what"), "the store is empty")


@app.command(cls=Verb)
def gc(
    age: Annotated[
        float, typer.Option(parser=age_value, metavar="AGE", help="Remove environments that are older: 12h, 30d")
    ],
    dry_run: DryRun = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Remove old environments from a store, as `bootseer env rm` does: the next start runs their command.

    Images stay, and so do blocks, because images and other environments may share them.

    Example: bootseer store gc --age 30d --dry-run
    """
    from bootseer.env import snapshots

    shared = open_shared(store)
    names = [one.name for one in snapshots.everything(shared) if one.created < time.time() - age]
    if not dry_run:
        snapshots.remove(shared, names)
    removed_snapshots(names, dry_run, as_json)
