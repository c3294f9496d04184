"""What a site runs the service with, and watches it by: a systemd unit, figures for Prometheus."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from bootseer.errors import ConfigError, doing
from bootseer.node.protocol import NodeStatus
from bootseer.prometheus import labels, metric

PATH = Path("/etc/systemd/system/bootseer-node.service")
_UNIT = """\
[Unit]
Description=bootseer: images, environments and checkpoints for the users and pods of this node
Documentation=https://arxiv.org/abs/2507.12619
Wants=network-online.target
After=network-online.target remote-fs.target
Before=containerd.service
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={command}
# Block servers stay when the service ends or is replaced: jobs and pods read through them, and the next one adopts all.
KillMode=process
SuccessExitStatus=143
Restart=on-failure
RestartSec=1
OOMScoreAdjust={score}
LimitNOFILE=1048576
TasksMax=infinity
# Add nothing that gives the service mounts of its own (PrivateTmp=, ProtectSystem=): others must see what it mounts.

[Install]
WantedBy=multi-user.target
"""


def systemd_unit(command: Sequence[str], score: int) -> str:
    """The unit that runs ``command``, which is to be killed as late as ``score`` says where memory is short."""
    return _UNIT.format(command=shlex.join(command).replace("%", "%%"), score=score)


def served(unit: Path) -> tuple[list[str], list[str]]:
    """The command line in the file ``unit``, up to ``node serve``, and the options behind that; both empty where there
    is no such file. Raises `ConfigError` for the unit of anything else."""
    with doing(f"read {unit}"):
        if not unit.exists():
            return [], []
        text = unit.read_text(errors="replace")
    try:
        lines = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart=")]
        words = shlex.split(" ".join(lines).replace("%%", "%"))
        at = words.index("serve", words.index("node") + 1) + 1
    except ValueError:
        raise ConfigError(
            f"{unit} runs something else than bootseer node serve", hint="look at its ExecStart"
        ) from None
    options: list[str] = []
    for word in words[at:]:
        if options and not word.startswith("-"):
            options[-1] += f"={word}"
        else:
            options.append(word)
    return words[:at], options


def up(answers: bool) -> str:
    """Whether the daemon ``answers``, in the text format of Prometheus."""
    lines = metric("bootseer_node_up", "gauge", "1 while the node daemon answers.", [("", int(answers))])
    return "\n".join(lines) + "\n"


def metrics(status: NodeStatus) -> str:
    """``status`` in the text format of Prometheus."""
    lines: list[str] = []
    for name, value, text in (
        ("start_time_seconds", status.started, "When the daemon started, in seconds since 1970."),
        ("draining", int(status.draining), "1 while the service is being drained."),
        ("mounts", status.mounts, "Images mounted for users, or being mounted or unmounted."),
        ("lingering", status.lingering, "Mounts that were ended for users, but that somebody still uses."),
        ("requests_running", status.running, "Requests that are being worked off."),
        ("connections", status.connections, "Clients connected, the one that asks included."),
    ):
        lines += metric(f"bootseer_node_{name}", "gauge", text, [("", value)])
    for name, kind, text in (
        ("up", "gauge", "1 while the part of the service serves."),
        ("starts_total", "counter", "How often the part was started."),
        ("mounts", "gauge", "What the part has mounted for pods."),
    ):
        values = {
            part: {"up": int(found.serves), "starts_total": found.starts, "mounts": found.mounts}[name]
            for part, found in status.parts.items()
        }
        samples = [(labels(part=part), value) for part, value in values.items()]
        lines += metric(f"bootseer_node_part_{name}", kind, text, samples)
    requests = [
        (labels(request=kind, result=result), count)
        for result, counts in (("done", status.done), ("failed", status.failed))
        for kind, count in sorted(counts.items())
    ]
    lines += metric("bootseer_node_requests_total", "counter", "Requests answered.", requests)
    return "\n".join(lines) + "\n"
