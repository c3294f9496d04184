"""``bootseer fs commit|latest|verify``: checkpoints of a striped store."""

from __future__ import annotations

import typer

from bootseer.cli._fs import CHECKPOINTS, Url, files_text, place, progress
from bootseer.cli._shared import AsJson, answer


def register(app: typer.Typer) -> None:
    for verb in (commit, latest, verify):
        app.command(rich_help_panel=CHECKPOINTS)(verb)


def commit(
    url: Url,
    as_json: AsJson = False,
) -> None:
    """Publish the folder at URL as a complete checkpoint. The first commit wins.

    Writes into the folder that are under way are ended.
    """
    fs, path = place(url)
    made = fs.commit(path)
    answer(made, as_json, f"{url}: {files_text(len(made.files), made.size)} committed")


def latest(url: Url, as_json: AsJson = False) -> None:
    """Print the URL of the newest complete checkpoint in the folder URL."""
    fs, path = place(url)
    found = fs.latest(path)
    full = f"{fs.url.rstrip('/')}/{found}"
    answer({"path": found, "url": full}, as_json, full)


def verify(url: Url, as_json: AsJson = False) -> None:
    """Read everything at or below URL and check every chunk, digest and COMMIT."""
    fs, path = place(url)
    with progress("verify", as_json) as report:
        found = fs.verify(path, progress=report)
    total = sum(stat.size for stat in found)
    line = f"{url}: {files_text(len(found), total)}, all right"
    answer({"ok": True, "url": url, "files": len(found), "bytes": total}, as_json, line)
