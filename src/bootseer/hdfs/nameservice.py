"""The NameNodes of a name service (``hdfs://service/...``), as the site's ``hdfs-site.xml`` has them.

Read as Hadoop's own clients do: from ``HADOOP_CONF_DIR``, else ``$HADOOP_HOME/etc/hadoop``. Keys:
``dfs.ha.namenodes.<service>`` and ``dfs.namenode.rpc-address.<service>.<namenode>``; without the first (federation
without high availability) ``dfs.namenode.rpc-address.<service>``. What the site says of DataNodes is read here, too.
"""

from __future__ import annotations

import functools
import os
import xml.etree.ElementTree as xml
from pathlib import Path
from urllib.parse import urlsplit

from bootseer.errors import ConfigError, UnsupportedError

_PORT = 8020  # Hadoop's default


def addresses(service: str) -> tuple[tuple[str, int], ...]:
    """(host, port) of each NameNode. `UnsupportedError` says why they cannot be told; `ConfigError`: a damaged file."""
    if not (folder := _folder()):
        raise UnsupportedError(f"name service {service}, and HADOOP_CONF_DIR is not set", hint="set HADOOP_CONF_DIR")
    found = _settings(folder)
    if found.get(f"dfs.client.failover.resolve-needed.{service}") == "true":
        raise UnsupportedError(f"name service {service} stands for the addresses of one host name")
    key = f"dfs.namenode.rpc-address.{service}"
    names = found.get(f"dfs.ha.namenodes.{service}", "")
    keys = [f"{key}.{name.strip()}" for name in names.split(",") if name.strip()] or [key]
    return tuple(_address(found.get(each, ""), each, folder) for each in keys)


def by_hostname() -> bool:
    """Whether DataNodes are reached by their names only (``dfs.client.use.datanode.hostname``). `ConfigError`.

    Where their addresses are those of a network of their own. Read once per folder of settings, as Hadoop does.
    """
    return (folder := _folder()) is not None and _by_hostname(folder)


@functools.cache
def _by_hostname(folder: Path) -> bool:
    return _settings(folder).get("dfs.client.use.datanode.hostname", "").lower() == "true"


def _folder() -> Path | None:
    if set_ := os.environ.get("HADOOP_CONF_DIR"):
        return Path(set_)
    home = os.environ.get("HADOOP_HOME")
    return Path(home, "etc", "hadoop") if home else None


def _settings(folder: Path) -> dict[str, str]:
    return _read(folder / "core-site.xml") | _read(folder / "hdfs-site.xml")


def _read(file: Path) -> dict[str, str]:
    try:
        tree = xml.parse(file)
    except FileNotFoundError:
        return {}
    except (OSError, xml.ParseError) as exc:
        raise ConfigError(f"cannot read {file}: {exc}") from None
    pairs = ((each.findtext("name"), each.findtext("value")) for each in tree.iter("property"))
    return {name.strip(): (value or "").strip() for name, value in pairs if name}


def _address(text: str, key: str, folder: Path) -> tuple[str, int]:
    if not text:
        raise UnsupportedError(f"{folder}/hdfs-site.xml does not set {key}")
    if "${" in text:
        raise UnsupportedError(f"{key} in {folder}/hdfs-site.xml refers to other settings")
    parts = urlsplit(f"//{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host:
        raise ConfigError(f"{key} in {folder}/hdfs-site.xml is no address: {text}")
    return host, port or _PORT
