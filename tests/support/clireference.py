"""The page docs/reference/cli.md, made from the command line itself: ``python -m support.clireference`` writes it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from bootseer.cli.verbs import assemble

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"
HEAD = """# Command line

<!-- Made by `python -m support.clireference`; a test compares it with the command line. -->

`bootseer [OPTIONS] GROUP VERB ...`. Options of `bootseer` itself go before the group, those of a verb after the verb.
All verbs have `--help`.

- **Verbs mean the same in every group.** `ls` lists, `inspect` tells of one thing, `rm` removes what is named, `gc`
  makes room, `unmount` ends a mount.
- **`--json`** prints one JSON document on stdout and nothing else. `ls` and other verbs that tell of any number
  of things print a list of objects; all other verbs print one object. Sizes are in bytes, times in seconds (a point in
  time: since 1970). Verbs that check say `"ok"`; verbs that remove say `"dry_run"` and `"removed"`, a list of objects.
- **`--dry-run`, `-n`** says what would be removed and changes nothing. **`--limit N`** prints at most N rows.
  **`--store URL`** names the store in place of the settings.
- Messages go to stderr. A failure is one line there and an [exit code](exit-codes.md).
- `bootseer --install-completion` has the shell complete verbs, options and their values, images and environments of the
  store, and mount points.
"""


def walk(command: Any, words: tuple[str, ...] = ("bootseer",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands that are not hidden, groups before their verbs."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from walk(inner, (*words, name))


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(assemble())


def page() -> str:
    parts = [HEAD]
    for words, command in walk(command_line()):
        group = hasattr(command, "commands")
        arguments = [_name(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
        usage = "" if group else " ".join([*words, *(["[OPTIONS]"] if command.params else []), *arguments])
        parts.append(f"{'##' if group else '###'} `{' '.join(words)}`\n\n{_text(command.help, usage)}")
        rows = [_row(parameter) for parameter in command.params if not parameter.hidden]
        if rows := [row for row in rows if row]:
            parts.append("| | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _text(text: str, usage: str) -> str:
    paragraphs = [" ".join(part.split()) for part in text.replace("\f", "").split("\n\n")]
    examples = [part.removeprefix("Example: ") for part in paragraphs if part.startswith("Example: ")]
    rest = [part for part in paragraphs if not part.startswith("Example: ")]
    code = ["\n".join(["```", usage, *examples, "```"])] if examples else [f"`{usage}`"] if usage else []
    return "\n\n".join([*rest, *code]) + "\n"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = str(parameter.metavar or parameter.name.upper())
        return name if parameter.required or name.startswith("[") else f"[{name}]"
    value = "" if parameter.is_flag or parameter.count else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(f"`{option}{value}`" for option in [*parameter.opts, *parameter.secondary_opts])


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"| `{_cell(_name(parameter))}` | {_cell(parameter.help)} |" if parameter.help else ""
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    plain = shown not in (None, False, True, "", "None") and not callable(shown) and not isinstance(shown, list | tuple)
    default = (
        f" (default: {shown})" if plain and not parameter.count and "default:" not in (parameter.help or "") else ""
    )
    return f"| {_cell(_name(parameter))} | {_cell(parameter.help)}{default} |"


def _cell(text: str | None) -> str:
    return re.sub(r"\|", r"\\|", " ".join((text or "").split()))


if __name__ == "__main__":
    PAGE.write_text(page())
