"""``bootseer fs``: files and checkpoints of a striped store; one module per group of verbs."""

from __future__ import annotations

import typer

from bootseer.cli._shared import Group, add_verbs
from bootseer.cli.fs_care import fsck, gc
from bootseer.cli.fs_files import commit, cp, get, inspect, ls, mv, put, rm
from bootseer.cli.fs_mount import mount

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Striped files and checkpoints in a folder, on HDFS or any fsspec store.\n\n"
    "A file is spread over several storage files, so that a read has the bandwidth of many DataNodes. It appears whole "
    "or not at all, and every chunk is checked. A folder with a COMMIT is a complete checkpoint.",
)

add_verbs(
    app,
    {
        "Files and checkpoints": (put, get, cp, ls, inspect, mv, rm, commit),
        "Mount": (mount,),
        "Maintenance": (fsck, gc),
    },
)
