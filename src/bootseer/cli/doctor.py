"""``bootseer doctor``."""

from __future__ import annotations

import json

import typer

from bootseer.cli._shared import AsJson, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(as_json: AsJson = False) -> None:
    """Try what a fast start needs on this machine, and say what is missing, what that costs and how to get it.

    Exit code 0: the fast way works. 77: it lacks only privileges. 71: something else essential is missing, named in the
    last line.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from bootseer import config
    from bootseer.doctor import examine
    from bootseer.kernel import mount

    settings = config.load()
    mount.private_namespace()  # so that even a kill of this command leaves no mount behind
    console, errors = Console(), Console(stderr=True)

    with errors.status("examining this machine") as status:
        report = examine(settings, progress=lambda check: status.update(f"{check.name}: {check.status}"))

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
        console.print("\nThe fast way works here", highlight=False, markup=False)
    raise typer.Exit(report.exit_code)
