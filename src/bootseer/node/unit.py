"""What a site runs the daemon with, and watches it by: a systemd unit, figures for Prometheus."""

from __future__ import annotations

from bootseer.node.protocol import NodeStatus

_UNIT = """\
[Unit]
Description=bootseer node daemon: images for the users of this node
Documentation=https://arxiv.org/abs/2507.12619
Wants=network-online.target
After=network-online.target remote-fs.target

[Service]
Type=notify
ExecStart={command}
# Block servers stay when the daemon ends or is replaced: jobs read through them, and the next daemon adopts the mounts.
KillMode=process
SuccessExitStatus=143
Restart=on-failure
RestartSec=1
OOMScoreAdjust=-500
LimitNOFILE=65536
TasksMax=infinity
# Add nothing that gives the service mounts of its own (PrivateTmp=, ProtectSystem=): jobs must see what it mounts.

[Install]
WantedBy=multi-user.target
"""


def systemd_unit(command: str) -> str:
    return _UNIT.format(command=command.replace("%", "%%"))


def metrics(status: NodeStatus) -> str:
    """``status`` in the text format of Prometheus."""
    lines = []
    for name, value, text in (
        ("start_time_seconds", status.started, "When the daemon started, in seconds since 1970."),
        ("draining", int(status.draining), "1 while the daemon is being drained."),
        ("mounts", status.mounts, "Images mounted for users, or being mounted or unmounted."),
        ("requests_running", status.running, "Requests that are being worked off."),
        ("connections", status.connections, "Clients connected, the one that asks included."),
    ):
        lines += [f"# HELP bootseer_node_{name} {text}", f"# TYPE bootseer_node_{name} gauge"]
        lines.append(f"bootseer_node_{name} {value}")
    lines += ["# HELP bootseer_node_requests_total Requests answered.", "# TYPE bootseer_node_requests_total counter"]
    for result, counts in (("done", status.done), ("failed", status.failed)):
        for kind, count in sorted(counts.items()):
            lines.append(f'bootseer_node_requests_total{{request="{kind}",result="{result}"}} {count}')
    return "\n".join(lines) + "\n"
