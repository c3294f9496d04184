"""``bootseer config``: the settings in use."""

from __future__ import annotations

import json

import typer

from bootseer import config as node_settings
from bootseer.cli._shared import AsJson, answer_table

app = typer.Typer(no_args_is_help=True, help="The settings of this node")


@app.callback()
def _group() -> None:
    """The settings of this node."""


@app.command()
def show(as_json: AsJson = False) -> None:
    """Show each setting in use and where it comes from: default, the settings file, or an environment variable.

    The file is /etc/bootseer.toml, or what --config or BOOTSEER_CONFIG names. Passwords in URLs are not shown.

    Example: bootseer --config site.toml config show
    """
    config, sources = node_settings.trace()
    values = {name: node_settings.shown(getattr(config, name)) for name in config.__struct_fields__}
    if not config.store:
        values["store"], sources["store"] = node_settings.shown(config.store_url), "default (in cache_dir)"
    found = [{"name": name, "value": value, "source": sources[name]} for name, value in values.items()]
    rows = [(name, json.dumps(value), sources[name]) for name, value in values.items()]
    columns = ("setting", "value", "from")
    answer_table(found, as_json, columns, rows, columns, "")
