"""What a start of bench/cluster is like: one TOML file of bench/cluster/scenarios."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from bootseer.errors import ConfigError, NotFoundError

FOLDER = Path(__file__).parent / "scenarios"
Variant = Literal["ordinary", "local", "strongest", "first", "first-uv", "again", "strict"]
Store = Literal["hdfs", "registry", "mirror"]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One scenario; its name is that of the file."""

    about: str
    """One line for who looks at the list."""
    name: str = ""
    variants: tuple[Variant, ...] = ("ordinary", "strongest", "again")
    """``first``: bootseer, where nothing is known of the job yet; ``first-uv``: the same with the set-up command of
    ``strongest``; ``again``: where it has started before; ``strict``: the same, but its checkpoint waits for the hot
    blocks of the image however late they are. ``local`` comes by itself after ``ordinary``."""
    kept: bool = False
    """The nodes have what the start before has left on them."""
    cycle: Literal["cold", "hot"] = "cold"
    """Hot: the image stage does not count, as in a restart inside of a job's containers."""
    slow_node: Share = 1.0
    """What the link of one node carries of what it should."""
    store: Store = "hdfs"
    """Where image and snapshot come from: ``hdfs``; ``registry``, which each node asks; ``mirror``, a cache of
    that registry with a link of its own, which the nodes ask first. The checkpoint is in HDFS always."""
    nodes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """So many of the cluster's nodes start; 0: all."""
    sizes: tuple[Annotated[int, msgspec.Meta(ge=1, le=64)], ...] = ()
    """The scenario once for each of these ``nodes`` that the cluster has, under the name ``NAME-SIZE``."""


def of_sizes(scenario: Scenario, most: int) -> list[Scenario]:
    """The scenario, or one for each of its sizes in a cluster of ``most`` nodes."""
    sizes = [size for size in scenario.sizes if size <= most]
    replaced = msgspec.structs.replace
    return [replaced(scenario, name=f"{scenario.name}-{size}", nodes=size) for size in sizes] or [scenario]


def load(named: str) -> Scenario:
    """The scenario of a file, or of that name in bench/cluster/scenarios. Raises `NotFoundError` or `ConfigError`."""
    path = Path(named) if named.endswith(".toml") else FOLDER / f"{named}.toml"
    try:
        given = tomllib.loads(path.read_text())
        return msgspec.convert({**given, "name": path.stem}, Scenario)
    except FileNotFoundError:
        raise NotFoundError(f"no scenario {named}", hint=f"there are {', '.join(names())}, or name a file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as exc:
        raise ConfigError(f"scenario {path}: {exc}", hint="bench/cluster/scenario.py lists every key") from None


def names() -> list[str]:
    """The scenarios that come with the bench, ``cold`` first: figures of others are relative to it."""
    found = sorted(path.stem for path in FOLDER.glob("*.toml"))
    return sorted(found, key=lambda name: name != "cold")
