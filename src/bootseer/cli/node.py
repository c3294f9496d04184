"""``bootseer node``: the service of a node, for its users, for containerd, for the kubelet and for Slurm."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Annotated

import typer

from bootseer.cli import node_install
from bootseer.cli._shared import AsJson, Group, add_verbs, answer, settings, time_text
from bootseer.cli.node_install import KUBELET, SCORES, SNAPSHOTS, SOCKET, Containerd, Csi, Kubelet, Snapshots, Socket
from bootseer.errors import BootseerError, UnavailableError, extra
from bootseer.units import count_text, size_text

log = logging.getLogger(__name__)
app = typer.Typer(cls=Group, no_args_is_help=True, help="The service of a node: images for its users, pods and jobs")


def serve(
    containerd: Containerd = False,
    csi: Csi = False,
    containerd_root: Snapshots = SNAPSHOTS,
    containerd_socket: Socket = SOCKET,
    kubelet_dir: Kubelet = KUBELET,
) -> None:
    """Be the service, as root, until a signal or `bootseer node drain` ends it. What is mounted stays.

    It adopts what an earlier one has mounted. Each part (that for users, --containerd, --csi) is a process of its own,
    which is started again when it ends.
    """
    from bootseer.kernel import parts
    from bootseer.loglimit import LogRateLimit
    from bootseer.node.daemon import Daemon

    def users() -> None:
        for handler in logging.getLogger().handlers:
            handler.addFilter(LogRateLimit())  # any user can cause lines
        Daemon(config, found, _restorer()).run()

    def snapshotter() -> None:
        with extra("containerd", "the snapshotter"):
            from bootseer.containerd import server
        server.serve(containerd_root, containerd_socket, config, found["containerd"])

    def driver() -> None:
        with extra("containerd", "the CSI driver"):
            from bootseer.csi import server
        server.serve(kubelet_dir, config, found["csi"])

    config = settings()
    runs: dict[str, Callable[[], None]] = {"node": users}
    runs |= {"containerd": snapshotter} if containerd else {}
    runs |= {"csi": driver} if csi else {}
    found = parts.shared(list(runs))
    if len(runs) == 1:  # one process is enough
        found["node"].pid, found["node"].starts = os.getpid(), 1
        users()
    elif code := parts.keep(found, runs, SCORES):
        raise typer.Exit(code)


def status(
    as_json: AsJson = False,
    metrics: Annotated[
        bool,
        typer.Option("--metrics", help="Print its figures for Prometheus, as node_exporter's text files have them"),
    ] = False,
) -> None:
    """Say what the service does, and how the servers of this user's mounts and the node cache are.

    Exit code 69 when the service, a part of it or the server of a mount does not answer. With --metrics 0: the figures
    say it, also where no service is wanted. As root, `bootseer image status` lists what it has mounted for users.
    """
    import msgspec

    from bootseer.node import client, figures
    from bootseer.node import unit as units

    config = settings()
    if metrics:
        look = figures.look(config)
        try:
            found = client.node(config=config)
        except BootseerError as exc:  # also one of another version
            typer.echo(f"{units.up(False)}{look.metrics()}", nl=False)
            log.info("%s", exc)
        else:
            typer.echo(f"{units.up(True)}{units.metrics(found)}{look.metrics()}", nl=False)
        return
    found = client.node(config=config)
    look = figures.look(config)
    state = "is being drained: it mounts nothing more" if found.draining else "serves"
    lingering = f" ({found.lingering} more were ended, but are in use)" if found.lingering else ""
    others = [
        f"  part {name}: {f'process {part.pid}' if part.serves else 'does not serve'}, "
        f"{count_text(part.starts, 'start', 'starts')}, {count_text(part.mounts, 'mount', 'mounts')}"
        for name, part in found.parts.items()
        if name != "node"
    ]
    servers = ", ".join(
        f"{count} {state}"
        for state in ("serving", "dead", "silent")
        if (count := look.count(state)) or state == "serving"
    )
    told = {**msgspec.to_builtins(found), "figures": msgspec.to_builtins(look)}
    answer(
        told,
        as_json,
        f"node daemon {found.pid} of bootseer {found.version} {state}, since {time_text(found.started)}",
        f"  {count_text(found.mounts, 'mount', 'mounts')}{lingering}, "
        f"{count_text(found.running, 'request', 'requests')} running",
        f"  answered: {_counts(found.done)}",
        f"  failed: {_counts(found.failed)}",
        *others,
        f"  servers of mounts: {servers}; node cache: {size_text(look.cache_bytes)}",
    )
    bad = [f"part {name} does not serve" for name, part in found.parts.items() if not part.serves]
    bad += [
        f"{count_text(look.count(state), 'server is', 'servers are')} {state}"
        for state in ("dead", "silent")
        if look.count(state)
    ]
    if bad:
        raise UnavailableError(
            f"the node is not well: {', '.join(bad)}", hint="see bootseer image status, and the service's log"
        )


def drain(as_json: AsJson = False) -> None:
    """Have the service refuse new mounts, and end when none is left. A restart of the service takes this back."""
    from bootseer.node import client

    config = settings()
    client.drain(config=config)
    answer({"draining": True}, as_json)


def _restorer() -> Callable[[list[str], int], bool]:
    """What does `bootseer env run` with these words for a process whose parent has this number, when that is a restore
    and no more. All that it needs is loaded now."""
    import importlib

    from typer.main import get_command

    from bootseer import patterns
    from bootseer.blocks.serving.client import SERVER
    from bootseer.cli import env
    from bootseer.cli.verbs import assemble

    for name in ("bootseer.env", SERVER[-1]):
        importlib.import_module(name)
    patterns.compile_all()
    command = get_command(assemble("env"))

    def restore(words: list[str], parent: int) -> bool:
        env.restoring_for = parent
        return bool(command.main(words, "bootseer", standalone_mode=False) == 0)

    return restore


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "nothing"


add_verbs(app, {"Commands": (serve, status, drain, node_install.install, node_install.uninstall)})
