import typer


def register(app: typer.Typer) -> None:
    """To be written."""
