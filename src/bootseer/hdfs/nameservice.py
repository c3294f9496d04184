"""The NameNodes that a URL names: one by its address, or those of a name service (``hdfs://service/...``), as the
site's ``hdfs-site.xml`` has them.

Read as Hadoop's own clients do: from ``HADOOP_CONF_DIR``, else ``$HADOOP_HOME/etc/hadoop``. Keys:
``dfs.ha.namenodes.<service>`` and ``dfs.namenode.rpc-address.<service>.<namenode>``; without the first (federation
without high availability) ``dfs.namenode.rpc-address.<service>``; with ``dfs.client.failover.resolve-needed.<service>``
each address stands for all machines of its name. What the site says of DataNodes is read here, too.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bootseer.errors import ConfigError, UnavailableError
from bootseer.hdfs.dial import Address, machines
from bootseer.wiretypes import document

_PORT = 8020  # Hadoop's default
_DNS_SECONDS = 10.0
_XINCLUDE = "{http://www.w3.org/2001/XInclude}"
_RENAMED = {"fs.default.name": "fs.defaultFS"}  # since Hadoop 2
_NAMED, _DEEP = re.compile(r"\$\{[^${}]+\}"), 5

Property = tuple[str, str, bool]
"""Its name and value, and whether it is final: what is said later does not count."""


def split(url: str) -> tuple[str, str]:
    """``hdfs://host:port/base/dir`` as (``hdfs://host:port``, ``/base/dir``). `ConfigError` for other URLs.
    ``hdfs:///base/dir`` is in the file system that the site has as ``fs.defaultFS``. All behind the host is the path,
    with every ``#``, ``?`` and ``%`` that is in it."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    parts = [part for part in path.split("/") if part]
    try:
        host = host or _default()
        urlsplit(f"//{host}").port  # noqa: B018
    except ValueError:
        raise ConfigError(f"{url!r} has no port number", hint="write hdfs://host:port/path") from None
    if scheme != "hdfs" or not host or re.search(r"[\s#?%\\]", host):
        raise ConfigError(f"not an HDFS URL: {url!r}", hint="write hdfs://host:port/path or hdfs://nameservice/path")
    if {".", ".."} & set(parts):
        raise ConfigError(f"{url!r} has a part . or ..", hint="write the path that it stands for")
    return f"hdfs://{host}", f"/{'/'.join(parts)}"


def _default() -> str:
    """The NameNode or name service that the site's ``core-site.xml`` names, "" for none."""
    found = _settings(where).get("fs.defaultFS", "") if (where := folder()) else ""
    return found.removeprefix("hdfs://").partition("/")[0] if found.startswith("hdfs://") else ""


def addresses(service: str) -> tuple[Address, ...]:
    """Each NameNode. Raises `ConfigError`; `UnavailableError` where DNS is to tell them and does not."""
    if not (where := folder()):
        raise ConfigError(f"name service {service}, and HADOOP_CONF_DIR is not set", hint="set it, or write host:port")
    found = _settings(where)
    key = f"dfs.namenode.rpc-address.{service}"
    names = found.get(f"dfs.ha.namenodes.{service}", "")
    keys = [f"{key}.{name.strip()}" for name in names.split(",") if name.strip()] or [key]
    told = [_address(found.get(each, ""), each, where) for each in keys]
    if found.get(f"dfs.client.failover.resolve-needed.{service}", "").lower() == "true":
        try:
            told = [one for each in told for one in machines(*each, time.monotonic() + _DNS_SECONDS)]
        except OSError as exc:
            raise UnavailableError(f"cannot look up the NameNodes of name service {service}: {exc}") from None
    return tuple(told)


def by_hostname() -> bool:
    """Whether DataNodes are reached by their names only (``dfs.client.use.datanode.hostname``), as where their
    addresses are those of a network of their own. `ConfigError`."""
    return setting("dfs.client.use.datanode.hostname").lower() == "true"


def setting(name: str) -> str:
    """What the site says, "" where it says nothing. `ConfigError`. Read once per folder of settings, as Hadoop does."""
    return _known(where).get(name, "") if (where := folder()) else ""


@functools.cache
def _known(folder: Path) -> dict[str, str]:
    return _settings(folder)


def folder() -> Path | None:
    """Where the site's settings are, None when nothing says it."""
    if set_ := os.environ.get("HADOOP_CONF_DIR"):
        return Path(set_)
    home = os.environ.get("HADOOP_HOME")
    return Path(home, "etc", "hadoop") if home else None


def _settings(folder: Path) -> dict[str, str]:
    """With the values that they refer to in place of ``${name}``, where the site says those."""
    found, final = dict[str, str](), set[str]()
    for name, value, last in (*_read(folder / "core-site.xml"), *_read(folder / "hdfs-site.xml")):
        if value and name not in final:
            found[name] = value
        if last:
            final.add(name)
    for _ in range(_DEEP):
        known = {f"${{{name}}}": value for name, value in found.items() if "${" not in value}
        found = {name: _NAMED.sub(functools.partial(_value, known), value) for name, value in found.items()}
    return found


def _value(known: dict[str, str], found: re.Match[str]) -> str:
    return known.get(found[0], found[0])


def _read(file: Path) -> list[Property]:
    try:
        return list(_properties(file, _DEEP))
    except (OSError, xml.ParseError) as exc:
        if isinstance(exc, FileNotFoundError) and str(exc.filename) == str(file):
            return []
        why = f"{exc.strerror} ({exc.filename or file})" if isinstance(exc, OSError) else exc
        raise ConfigError(f"cannot read {file}: {why}", hint="HADOOP_CONF_DIR is the folder of such files") from None


def _properties(file: Path, depth: int, within: xml.Element | None = None) -> Iterator[Property]:
    """With those of files that it includes, or else of the fallback, as Hadoop reads them, ``depth`` deep."""
    if not depth:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), file)
    for each in xml.fromstring(document(file)) if within is None else within:
        if each.tag == "property":
            name, value, final = (each.findtext(tag) or each.get(tag) or "" for tag in ("name", "value", "final"))
            if name := name.strip():
                yield _RENAMED.get(name, name), value.strip(), final == "true"
        elif each.tag == f"{_XINCLUDE}include":
            try:
                yield from _properties(file.parent / each.get("href", "").removeprefix("file://"), depth - 1)
            except OSError:
                if (fallback := each.find(f"{_XINCLUDE}fallback")) is None:
                    raise
                yield from _properties(file, depth, fallback)
        else:
            yield from _properties(file, depth, each)


def _address(text: str, key: str, folder: Path) -> Address:
    if not text:
        raise ConfigError(f"{folder}/hdfs-site.xml does not set {key}")
    if "${" in text:
        raise ConfigError(f"{key} in {folder}/hdfs-site.xml refers to other settings", hint="write the address")
    parts = urlsplit(f"//{text.partition('://')[2] or text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host:
        raise ConfigError(f"{key} in {folder}/hdfs-site.xml is no address: {text}")
    return host, port or _PORT
