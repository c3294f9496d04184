"""``bootseer containerd``: the snapshotter of a Kubernetes node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli._shared import StoreUrl, count_text, settings
from bootseer.errors import BootseerError, ConfigError, doing, extra

app = typer.Typer(no_args_is_help=True, help="Pods whose image has not arrived: a snapshotter for containerd")

Root = Annotated[Path, typer.Option(metavar="DIR", help="State and files of snapshots, on a local disk")]
Socket = Annotated[Path, typer.Option(metavar="FILE", help="Where containerd reaches it")]
_ROOT = Path("/var/lib/bootseer/containerd")
_SOCKET = Path("/run/bootseer/containerd.sock")


@app.command()
def serve(root: Root = _ROOT, socket: Socket = _SOCKET, store: StoreUrl = "") -> None:
    """Serve snapshots to containerd until SIGTERM; run it as a service, see docs/howto/kubernetes.md.

    Layers of converted images are not pulled: containers get a lazily mounted tree. Other images work as always.
    """
    with extra("containerd", "the snapshotter"):
        from bootseer.containerd import server
    server.serve(root, socket, settings(store))


@app.command()
def config(
    containerd: Annotated[str, typer.Option(metavar="VERSION", help="1.6, 1.7 or 2")] = "1.6",
    check: Annotated[bool, typer.Option("--check", help="Say what a configuration lacks, in place of this")] = False,
    file: Annotated[Path, typer.Option(metavar="FILE", help="With --check: the configuration; `-`: stdin")] = Path(
        "/etc/containerd/config.toml"
    ),
    root: Root = _ROOT,
    socket: Socket = _SOCKET,
) -> None:
    """Print what the configuration of containerd needs, or check one (exit code 78 when something is missing).

    Example: containerd config dump | bootseer containerd config --check --file -
    """
    from bootseer import oci
    from bootseer.containerd import settings as containerd_settings

    if not check:
        typer.echo(containerd_settings.text(containerd, root, socket, oci.host_platform()), nl=False)
        return
    stdin = str(file) == "-"
    name = "the configuration on stdin" if stdin else str(file)
    with doing(f"read {name}"):
        content = sys.stdin.read() if stdin else file.read_text(errors="replace")
    lines = containerd_settings.missing(content, root, socket, oci.host_platform(), name)
    for line in lines:
        typer.echo(line)
    if lines:
        hint = "bootseer containerd config prints it; of a file with imports, check what containerd config dump prints"
        raise ConfigError(f"{name} lacks {count_text(len(lines), 'setting', 'settings')}", hint=hint)
    typer.echo(f"{name} has all that the snapshotter needs")


@app.command()
def uninstall(root: Root = _ROOT, socket: Socket = _SOCKET) -> None:
    """Remove the snapshotter's mounts and files, once nothing needs them; before, print the commands to run first."""
    with extra("containerd", "the snapshotter"):
        from bootseer.containerd import uninstall as removal
    lines = removal.needed(root)
    for line in lines:
        typer.echo(line)
    if lines:
        raise BootseerError(
            f"{count_text(len(lines), 'container or image needs', 'containers and images need')} the snapshotter",
            hint="run what is printed above while it still serves, then this again",
        )
    removal.remove(root, socket, settings())
    typer.echo(f"removed {root}")
