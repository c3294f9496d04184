"""``bootseer csi``: the CSI driver of a Kubernetes node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli._shared import StoreUrl, settings
from bootseer.errors import extra

app = typer.Typer(no_args_is_help=True, help="Volumes of pods: images, environments and checkpoints, over CSI")


@app.callback()
def _group() -> None:
    pass


@app.command()
def serve(
    kubelet_dir: Annotated[Path, typer.Option(metavar="DIR", help="The --root-dir of the kubelet")] = Path(
        "/var/lib/kubelet"
    ),
    store: StoreUrl = "",
) -> None:
    """Serve volumes to the kubelet until SIGTERM; run it as a service, see docs/howto/kubernetes.md."""
    with extra("containerd", "the CSI driver"):
        from bootseer.csi import server
    server.serve(kubelet_dir, settings(store))
