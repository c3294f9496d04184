"""What the verbs share: options, progress bars, tables and JSON on stdout."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.progress import TaskID

Ref = Annotated[str, typer.Argument(metavar="REF", help="HOST[:PORT]/NAME[:TAG] or oci:DIR[:TAG]")]
StoreUrl = Annotated[
    str, typer.Option("--store", metavar="URL", help="Folder, hdfs://, s3:// or registry:// (default: settings)")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document")]
PlainHttp = Annotated[
    bool | None,
    typer.Option("--plain-http/--https", help="Ask REF's registry without TLS (default: at loopback)"),
]
VerifyKey = Annotated[
    str,
    typer.Option(metavar="FILE", help="Public keys, one of which must have signed the image (default: settings)"),
]
RequireSignature = Annotated[
    bool, typer.Option("--require-signature", help="Refuse the image when no key is named to verify it with")
]
JobName = Annotated[str, typer.Option("--job", metavar="NAME", help="Whose earlier starts to prefetch by")]
COMMAND_LAST = {"allow_interspersed_args": False}
"""For verbs that run a command: from its first word on, all options are its own."""


class Bars:
    """Progress bars on stderr for steps of more than two seconds; safe to update from any thread."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        self._bars = Progress(
            TextColumn("{task.description:<9}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=False),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()

    def update(self, step: str, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of ``step``; a step that is done has no bar any more."""
        if self._bars.disable or time.monotonic() - self._began < 2.0:
            return
        with self._lock:
            if not self._bars.live.is_started:
                self._bars.start()
            if step not in self._tasks:
                self._tasks[step] = self._bars.add_task(step)
            self._bars.update(self._tasks[step], completed=done, total=total or None)
            if 0 < total <= done:
                self._bars.remove_task(self._tasks.pop(step))

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> None:
    """A plain table on stdout; columns are set right except those in ``left``. Long texts are never cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold", no_wrap=name not in left)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    # Piped, a line is as long as it needs to be: whoever greps wants whole paths.
    Console(width=None if sys.stdout.isatty() else 1000, markup=False, highlight=False).print(table)


def one_line(text: str) -> str:
    """``text`` without what would move the cursor."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def count_text(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def print_json(value: object) -> None:
    import msgspec

    typer.echo(json.dumps(msgspec.to_builtins(value), indent=2))


def share_text(share: float) -> str:
    return f"{100 * share:.1f} %"
