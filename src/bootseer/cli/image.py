import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """To be written."""
