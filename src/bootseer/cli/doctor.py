"""``bootseer doctor``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from bootseer.cli._shared import AsJson, answer_table, print_json


def doctor(
    settings: Annotated[
        bool, typer.Option("--settings", help="Only show each setting in use, and where it comes from")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Try what a fast start needs on this machine, and say what is missing, what that costs and how to get it.

    Settings come from a variable BOOTSEER_NAME, from the file that --config or BOOTSEER_CONFIG names
    (/etc/bootseer.toml), or are defaults. Passwords in URLs are not shown.

    Exit code 0: the fast way works. 77: it lacks only privileges. 71: something else essential is missing, named in the
    last line.

    Example: bootseer --config site.toml doctor --settings
    """
    if settings:
        _settings(as_json)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from bootseer import config
    from bootseer.doctor import examine
    from bootseer.kernel import mount

    mount.private_namespace()  # so that even a kill of this command leaves no mount behind
    # Piped, a line is as long as it needs to be.
    console, errors = Console(width=None if sys.stdout.isatty() else 1000), Console(stderr=True)

    with errors.status("examining this machine") as status:
        report = examine(config.load(), progress=lambda check: status.update(f"{check.name}: {check.status}"))

    if as_json:
        print_json(report.as_json())
        raise typer.Exit(report.exit_code)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "", "found"):
        table.add_column(title, overflow="fold")
    colours = {"ok": "green", "limited": "yellow", "missing": "red"}
    for check in report.checks:
        table.add_row(f"[{colours[check.status]}]{check.status}[/]", check.name, escape(check.detail))
        if check.status != "ok" or check.cost:
            for label, text in (("costs", check.cost), ("get it", check.fix)):
                if text:
                    table.add_row("", "", f"  {label}: {escape(text)}", style="dim")
    console.print(table, highlight=False)
    console.print("\nsettings", highlight=False)
    for name, value in report.settings.items():
        console.print(f"  {name} = {json.dumps(value)}", highlight=False, markup=False, soft_wrap=True)
    if report.lacking:
        names = ", ".join(check.name for check in report.lacking)
        console.print(f"\nThe fast way does not work here: {names}", highlight=False, markup=False)
    else:
        runtime = any(check.name == "runtime" and check.status == "missing" for check in report.checks)
        console.print("\nThe fast way works here" + ", but for containers: no runtime" * runtime, highlight=False)
    raise typer.Exit(report.exit_code)


def _settings(as_json: bool) -> None:
    from bootseer import config

    found, sources = config.trace()
    values = {name: config.shown(getattr(found, name)) for name in found.__struct_fields__}
    if not found.store:
        values["store"], sources["store"] = config.shown(found.store_url), "default (in cache_dir)"
    told = [{"name": name, "value": value, "source": sources[name]} for name, value in values.items()]
    rows = [(name, json.dumps(value), sources[name]) for name, value in values.items()]
    columns = ("setting", "value", "from")
    answer_table(told, as_json, columns, rows, columns, "")
