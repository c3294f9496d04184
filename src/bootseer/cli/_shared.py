"""What the verbs share: groups, options, settings with what the options change, tables, JSON, progress bars."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from bootseer import config as node_settings
from bootseer.cli._completed import images
from bootseer.errors import ConfigError
from bootseer.profile.emit import redact
from bootseer.units import MOST, MOST_SECONDS, one_line, parse_age

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import TaskID

    from bootseer.config import Config
    from bootseer.objects import Store

log = logging.getLogger("bootseer")
Value = TypeVar("Value")


def understood(parse: Callable[[str], Value]) -> Callable[[str | Value], Value]:
    """``parse`` for an option: what it does not understand is a mistake in the command line (exit code 2)."""

    def parser(value: str | Value) -> Value:
        if not isinstance(value, str):
            return value  # the option's default
        try:
            return parse(value)
        except ConfigError as exc:
            raise typer.BadParameter(str(exc)) from None

    return parser


age_value = understood(parse_age)

_REF = "Image: HOST[:PORT]/NAME[:TAG|@DIGEST], oci:DIR[:NAME], docker-archive:FILE[:NAME] or oci-archive:FILE[:NAME]"
Ref = Annotated[str, typer.Argument(metavar="REF", help=_REF, autocompletion=images)]
StoreUrl = Annotated[
    str, typer.Option("--store", metavar="URL", help="Folder, hdfs://, s3:// or registry:// (default: settings)")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would go; change nothing")]
Limit = Annotated[int, typer.Option("--limit", min=0, metavar="N", help="Print at most N rows (0: all)")]
PlainHttp = Annotated[
    bool | None,
    typer.Option("--plain-http/--https", help="Ask REF's registry without TLS (default: at loopback)"),
]
Platform = Annotated[
    str, typer.Option(metavar="OS/ARCH[/VARIANT]", help="The image for such machines (default: as this one)")
]
VerifyKey = Annotated[
    str,
    typer.Option(metavar="FILE", help="Public keys, one of which must have signed the image (default: settings)"),
]
RequireSignature = Annotated[
    bool, typer.Option("--require-signature", help="Refuse the image when no key is named to verify it with")
]
_STORED = f"{_REF}, or its digest or first digits of it as `bootseer store ls` prints them"
Stored = Annotated[str, typer.Argument(metavar="REF", help=_STORED, autocompletion=images)]
JobName = Annotated[str, typer.Option("--job", metavar="NAME", help="Whose earlier starts to prefetch by")]
ForJob = Annotated[
    str, typer.Option("--for-job", metavar="ID", help="Mounts of the node daemon for this job, not for this session")
]
Volumes = Annotated[
    list[str] | None,
    typer.Option("--volume", "-v", metavar="SRC:DST[:ro]", help="Show a file or folder of this host in the image"),
]
_MEANT = {
    "cat": "image extract --file",
    "config": "doctor --settings",
    "df": "store du",
    "gc": "clean",
    "help": "--help",
    "images": "image ls",
    "info": "doctor",
    "list": "store ls",
    "log": "profile show",
    "logs": "profile show",
    "prune": "store gc",
    "ps": "image status",
    "pull": "image convert",
    "rmi": "image rm",
    "show": "profile show",
    "start": "run",
    "stats": "node status",
    "stop": "unmount",
    "top": "image status",
    "umount": "unmount",
    "version": "--version",
}
"""Word that is typed first -> a verb that has another name."""
_SAME = {
    "build": "convert",
    "cat": "get",
    "clean": "gc",
    "clear": "gc",
    "create": "run",
    "delete": "rm",
    "du": "ls",
    "list": "ls status",
    "prune": "gc",
    "ps": "status",
    "purge": "gc",
    "remove": "rm",
    "report": "show",
    "size": "du ls",
    "start": "serve run",
    "stop": "drain",
    "view": "show",
}
"""Word that is typed first -> what a group calls it that has such a verb."""


class Group(TyperGroup):
    """Verbs; for a word that is none, one line says which verbs of other groups may be meant."""

    whole: Callable[[], typer.Typer]
    """The command line with all groups; `main` sets it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from typer.main import get_command

        word, group = args[0], ctx.command_path
        same = [f"{group} {name}" for name in _SAME.get(word, "").split() if name in self.commands]
        meant = [f"bootseer {_MEANT[word]}"] if word in _MEANT and not same else []
        named = list(_named(get_command(Group.whole()), (word,), "bootseer"))
        if not (same or meant or named):  # what it is called elsewhere, or looks like here
            named = list(_named(get_command(Group.whole()), _SAME.get(word, "").split(), "bootseer"))
            named += [f"{group} {name}" for name in difflib.get_close_matches(word, self.commands)]
        found = dict.fromkeys([*same, *meant, *named])
        hint = f"did you mean {', '.join(found)}?" if found else f"{group} --help lists them"
        raise mistake(f"{group} has no verb {word!r}; {hint}")


class Verb(TyperCommand):
    """A verb that is given no number which would end it later: none that is not finite, nor one that is longer than
    what counts bytes or seconds here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            most = MOST_SECONDS if isinstance(value, float) else MOST
            if isinstance(value, int | float) and not abs(value) <= most:
                raise typer.BadParameter(f"{value} is no number for this", ctx=ctx, param=param)
        return rest


def add_verbs(app: typer.Typer, panels: Mapping[str, Sequence[Callable[..., None]]]) -> None:
    """The verbs of a group by panel of its help, in the order of use. Of one that runs a ``command`` all options are
    that command's own from its first word on; one of a ``job_file`` sees itself to words that are too many."""
    for panel, verbs in panels.items():
        for verb in verbs:
            names = inspect.signature(verb).parameters
            how = {"allow_interspersed_args": "command" not in names, "allow_extra_args": "job_file" in names}
            app.command(verb.__name__.rstrip("_"), cls=Verb, rich_help_panel=panel, context_settings=how)(verb)


def _named(command: Any, words: Sequence[str], name: str) -> Iterator[str]:
    for verb, inner in getattr(command, "commands", {}).items():
        if verb in words:
            yield f"{name} {verb}"
        yield from _named(inner, words, f"{name} {verb}")


def say(text: str) -> None:
    """A line on stderr, without what looks like a secret: people keep logs of it."""
    sys.stderr.write(f"bootseer: {one_line(redact('', text))}\n")


def mistake(text: str) -> typer.Exit:
    """A mistake in the command line, told in one line."""
    say(text)
    return typer.Exit(2)


def notice(text: str) -> None:
    """A line on stderr, but for ``--quiet``."""
    if log.isEnabledFor(logging.WARNING):
        say(text)


def settings(store: str = "", verify_key: str = "", require_signature: bool = False) -> Config:
    """The settings of this node, with what the command line says instead."""
    import msgspec

    found = node_settings.load().trusting(verify_key, require_signature)
    return msgspec.structs.replace(found, store=store or found.store)


def volume_parts(text: str) -> tuple[str, str, bool]:
    """Source, target and whether it is read-only of ``SRC:DST[:ro]``. Raises `ConfigError`."""
    source, *more = text.split(":")
    if not source or not more or more[1:] not in ([], ["ro"], ["rw"]):
        raise ConfigError(f"bad volume {text!r}", hint="write SRC:DST or SRC:DST:ro")
    return os.path.abspath(source), more[0], more[1:] == ["ro"]


def open_shared(store: str = "") -> Store:
    """The store that ``--store`` names, or the settings, to read it: `NotFoundError` where that is not there. The one
    beside the cache is empty until it is."""
    from bootseer.objects import open_store

    config = settings(store)
    shared = open_store(config.store_url)
    if config.store:
        shared.check_there()
    return shared


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
            disable=quiet or not log.isEnabledFor(logging.WARNING) or not sys.stderr.isatty(),
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

    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge = table.show_edge = False
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold", no_wrap=name not in left)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    # Piped, a line is as long as it needs to be: whoever greps wants whole paths.
    Console(width=None if sys.stdout.isatty() else 1000, markup=False, highlight=False).print(table)


def print_whole(*shown: RenderableType) -> None:
    """On stdout. Piped, a line is as long as it needs to be; on a terminal as long as a table does, which would cut
    figures."""
    from rich.console import Console, Group
    from rich.measure import Measurement
    from rich.table import Table

    def needed(parts: Sequence[RenderableType]) -> int:
        found = [needed(one.renderables) for one in parts if isinstance(one, Group)]
        found += [Measurement.get(console, free, one).maximum for one in parts if isinstance(one, Table)]
        return max(found, default=0)

    console = Console()
    free = console.options.update(max_width=1000)
    width = max(needed(shown), console.width) if sys.stdout.isatty() else 1000
    Console(width=width, height=console.height, markup=False, highlight=False).print(*shown, sep="\n")


def print_json(value: object) -> None:
    import msgspec

    typer.echo(json.dumps(msgspec.to_builtins(value), indent=2))


def answer(value: object, as_json: bool, *lines: str) -> None:
    """``value`` as JSON, or the ``lines`` that say the same; what is no text in a name is escaped in them."""
    if as_json:
        print_json(value)
    else:
        for line in lines:
            typer.echo(one_line(line))


def answer_table(
    value: object, as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str], empty: str
) -> None:
    """``value`` as JSON, or a table that says the same; without rows ``empty``, a line on stderr."""
    if as_json:
        print_json(value)
    elif rows:
        print_table("", columns, rows, left=left)
    else:
        notice(empty)


def time_text(seconds: float) -> str:
    """A time in seconds since 1970, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def share_text(share: float) -> str:
    return f"{100 * share:.1f} %"


def write_out(pieces: Iterable[bytes], output: Path) -> None:
    """Write a file, or stdout where it is ``-``."""
    if str(output) == "-":
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    from bootseer.stripefs.localcopy import written

    with written(output) as file:
        for piece in pieces:
            file.write(piece)
