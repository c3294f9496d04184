"""``bootseer fs``: files and checkpoints of a striped store; one module per group of verbs."""

from __future__ import annotations

import typer

from bootseer.cli import fs_care, fs_checkpoints, fs_explain, fs_files, fs_mount
from bootseer.cli._shared import Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Striped files and checkpoints in a folder, on HDFS or any fsspec store.\n\n"
    "A file is spread over several storage files, so that a read has the bandwidth of many DataNodes. It appears whole "
    "or not at all, and every chunk is checked. A folder with a COMMIT is a complete checkpoint.",
)

for _group in (fs_files, fs_checkpoints, fs_care, fs_explain, fs_mount):
    _group.register(app)
