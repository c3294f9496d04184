"""Settings of this node: one typed object, one TOML file, environment overrides; ``bootseer doctor --settings`` prints.
Order, later wins: defaults, the file (``$BOOTSEER_CONFIG`` or ``/etc/bootseer.toml``), environment variables
(``BOOTSEER_CACHE_DIR`` and so on: the field's name in capitals)."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bootseer.errors import ConfigError
from bootseer.profile.emit import redact
from bootseer.units import MOST, parse_size
from bootseer.wiretypes import document, in_words, known, loaded

log = logging.getLogger(__name__)

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Host = Annotated[str, msgspec.Meta(pattern=r"^[^/\s]+$")]
DEFAULT_FILE = Path("/etc/bootseer.toml")
_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
"""Tells a pod where it is."""
_NOBODY = 65534
"""Whose files are, in a user namespace, that belong to somebody who has no number there."""


def _has_roots_folders() -> bool:
    """Whether this is root, and not that of a user namespace in which ``/`` and root's folders belong to nobody."""
    return os.geteuid() == 0 and os.stat("/").st_uid != _NOBODY


def _own_temporary() -> str:
    if os.geteuid() or _has_roots_folders():
        return f"/tmp/bootseer-{os.geteuid()}"
    return f"/tmp/bootseer-{Path('/proc/self/uid_map').read_text().split()[1]}.0"  # two such roots are not one


def _default_cache() -> str:
    if _has_roots_folders():
        return "/var/cache/bootseer"
    below = next(filter(os.path.isabs, (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))), "")
    return os.path.join(below, "bootseer") if below else f"{_own_temporary()}/cache"


def _default_state() -> str:
    if _has_roots_folders():
        return "/run/bootseer"
    if os.path.isabs(below := os.environ.get("XDG_RUNTIME_DIR", "")):
        return os.path.join(below, "bootseer")
    # where somebody else was quicker to make that in /tmp, and from then on
    other = os.path.join(_default_cache(), f"state-{os.uname().nodename}")
    own = _own_temporary()
    try:
        theirs = os.lstat(own).st_uid != os.geteuid()
    except OSError:
        theirs = False
    return other if theirs or os.path.isdir(other) else os.path.join(own, "bootseer")


def _default_tenant() -> str:
    try:
        return f"pods of {Path(_NAMESPACE).read_text().strip()[:100]}"
    except (OSError, ValueError):
        return ""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a node needs to know. Sizes in bytes, times in seconds."""

    cache_dir: str = msgspec.field(default_factory=_default_cache)
    """Node-local disk for blocks (ext4, xfs or btrfs)."""
    state_dir: str = msgspec.field(default_factory=_default_state)
    """Sockets, pids and mount records of running servers; need not survive a reboot."""
    node_dir: str = "/run/bootseer-node"
    """The socket of the node daemon and the folders of what it mounts (`bootseer node`)."""
    server_cgroup: str = ""
    """The cgroup, by its path below the top, that block servers go to (in each hierarchy that has it): a tree is shared
    by the jobs of a node. Empty: they stay in that of the job that mounts first, and end with it."""
    store: str = ""
    """Shared storage this site already has: a folder, ``hdfs://...``, ``s3://...``. Empty: a folder in the cache."""
    record_seconds: Seconds = 120.0
    """First touches are recorded for this long after a mount (the paper: about the first two minutes)."""
    demand_deadline: Seconds = 60.0
    """A read of a missing block fails with EIO when its bytes have not come after this long."""
    fill_quiet: Seconds = 120.0
    """Until the job is ready, background fill waits for this long without a miss: the start needs the cores."""
    background_fill: bool = True
    """Fetch the rest of a blob after its hot set, so that the store is needed no more."""
    readahead: bool = True
    """Have the kernel read what earlier starts of a job read, before the job does (``docs/internals/pagelist.md``)."""

    cache_limit: Annotated[float, msgspec.Meta(ge=0, le=MOST)] = 0.8
    """What the node cache (blocks of images, chunks of striped files) may take of its disk: a share up to 1, or bytes;
    0: no limit."""
    cache_keep_free: Annotated[float, msgspec.Meta(ge=0, le=MOST)] = 0.02
    """What the node cache leaves free on its disk, in the same way."""

    sign_key: str = ""
    """Private key (a PEM file) that images and environments are signed with. Empty: they are not signed."""
    verify_key: str = ""
    """Public keys (a PEM file), one of which must have signed an image or an environment before it is used. Empty: see
    next."""
    require_signature: bool = False
    """Refuse images and environments when there is no ``verify_key``."""

    tenant: str = msgspec.field(default_factory=_default_tenant)
    """For whom programs are started here: tenants have caches of their own (``[caches]``), whatever job files say. In a
    pod the namespace; else empty, and for a job file that root starts its owner counts."""

    pod_checkpoints: tuple[str, ...] = ()
    """Folders of a store, ``hdfs://...``, whose checkpoints pods may mount (`bootseer node serve --csi`);
    ``{namespace}`` stands for the pod's namespace. Empty: none. As environment variable: with spaces between them."""

    registry_mirrors: dict[str, tuple[str, ...]] = {}
    """Registry -> mirrors to read from first, ``[http[s]://]host[:port][/prefix]`` each. As environment variable:
    ``docker.io=mirror.site:5000,other.site quay.io=mirror.site:5000``."""

    plain_http: tuple[Host, ...] = ()
    """Registries that are asked without TLS, logins and all: ``host[:port]`` as in the names of images. Those at
    loopback addresses always are, but for pods (`bootseer node serve --csi`) only when they are named here. Also where
    `profile export` may send a token so. As environment variable: ``10.1.2.3:5000,registry.site``."""

    credential_providers: str = ""
    """The kubelet's image credential providers, ``FILE:FOLDER`` as its options ``--image-credential-provider-config``
    and ``--image-credential-provider-bin-dir`` say: asked for logins that no file has. Empty: nobody."""

    @property
    def store_url(self) -> str:
        """The configured store, or the embedded default (a folder beside the cache)."""
        return self.store or os.path.join(self.cache_dir, "store")

    def trusting(self, verify_key: str, require_signature: bool) -> Config:
        """These settings, but with that key, if it is not empty, and with a signature required, if it is."""
        return msgspec.structs.replace(
            self,
            verify_key=verify_key or self.verify_key,
            require_signature=require_signature or self.require_signature,
        )


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings. Raises `ConfigError` for an unreadable file, an unknown key or a bad value."""
    return trace(environ)[0]


def trace(environ: Mapping[str, str] | None = None) -> tuple[Config, dict[str, str]]:
    """As `load`; also where each setting comes from: ``default``, a file's path or an environment variable's name."""
    import tomllib  # block servers get their settings from who starts them

    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    explicit = env.get("BOOTSEER_CONFIG")
    path = Path(explicit) if explicit else DEFAULT_FILE
    if explicit or path.exists():
        try:
            values.update(loaded(tomllib.loads, document(path).decode()))
        except (OSError, ValueError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise ConfigError(f"cannot read settings from {path}: {why}") from None
    sources = dict.fromkeys(Config.__struct_fields__, "default") | dict.fromkeys(values, str(path))
    for name in values.keys() - set(Config.__struct_fields__):
        raise ConfigError(f"{path} has no setting {name!r}", hint=_meant(name))
    for name in _OWN:
        if name in values and not _usable(values[name]):
            del values[name]
            sources[name] = f"default (that in {path} is another user's)"
    for name in Config.__struct_fields__:
        if (text := env.get(variable := f"BOOTSEER_{name.upper()}")) is not None:
            sources[name] = variable
            values[name] = _LISTS[name](text) if name in _LISTS else text
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = _read(name, value, sources[name])
    try:
        found = msgspec.convert(values, known(Config), strict=False)
    except msgspec.ValidationError as exc:
        name = next((name for name in values if f"`$.{name}" in str(exc)), "")
        where = f"{name} = {shown(values[name])!r} (from {sources[name]})" if name else f"settings in {path}"
        raise ConfigError(f"{where}: {in_words(exc).partition(' - at')[0]}") from None
    for name in _SIZES:
        if 1 < (size := getattr(found, name)) < _LEAST:
            raise ConfigError(
                f"{name} = {size:g} (from {sources[name]}) is neither a share nor a size",
                hint=f'{size / 100:g} is a share of {size:g} %, "{size:g}G" so many bytes',
            )
    for variable in env:
        if variable.upper().startswith("BOOTSEER_") and (meant := _misspelt(variable)):
            log.warning("%s is no setting; did you mean %s?", variable, meant)
    return found, sources


def _usable(value: object) -> bool:
    """Whether this user may keep state in the folder: a file of settings has those of root, too."""
    if _has_roots_folders() or not isinstance(value, str):
        return True
    path = Path(os.path.expanduser(value))
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return os.access(next((one for one in path.parents if one.is_dir()), "/"), os.W_OK)


def _read(name: str, text: str, source: str) -> object:
    """The value of a setting that is written as a string. Raises `ConfigError`."""
    if name in _SIZES:
        try:
            return float(text)
        except ValueError:
            pass
        try:
            return parse_size(text)
        except ConfigError:
            raise ConfigError(
                f"{name} = {text!r} (from {source}) is neither a share nor a size", hint="write 0.8 or 50G"
            ) from None
    if name not in _PLACES or (not text and name not in _FOLDERS) or "://" in text:
        return text
    path = os.path.expanduser(text)
    if not os.path.isabs(path):
        home = "; no home folder is known here" if text.startswith("~") else ""
        scheme = re.match(r"(\w+):", text)
        hint = f"write {scheme[1]}://..." if scheme else "begin it with /"
        raise ConfigError(f"{name} = {text!r} (from {source}) is no whole path{home}", hint=hint)
    return path


def _meant(name: str) -> str:
    import difflib

    plain = name.lower().removeprefix("bootseer_")
    near = difflib.get_close_matches(plain, Config.__struct_fields__, n=1)
    return f"did you mean {near[0]}?" if near else "bootseer doctor --settings lists them"


def _misspelt(variable: str) -> str:
    """The variable that was meant; "" for one that is right, or near to none."""
    names = [f"BOOTSEER_{name.upper()}" for name in Config.__struct_fields__]
    if variable in names or variable in _OTHERS:
        return ""
    text = variable.upper()
    near = (name for name in (*names, *_OTHERS) if _slips(text, name) <= min(_FEW, len(name[9:]) // 2))
    longer = (name for name in names if re.match(name + "_(?!SERVICE_|PORT)|" + name + "[A-Z]", text))
    return next(near, "") or next(longer, "")


def _slips(one: str, other: str) -> int:
    """How many letters are wrong, missing or too many; `difflib` would be loaded late, perhaps beside a fork."""
    if abs(len(one) - len(other)) > _FEW:
        return _FEW + 1
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        above, row = row, [number]
        for at, wanted in enumerate(other):
            row.append(min(above[at + 1] + 1, row[at] + 1, above[at] + (letter != wanted)))
    return row[-1]


def shown(value: Any) -> Any:
    """A setting's value as it may be printed: without the logins and secrets of URLs."""
    if isinstance(value, str):
        return redact("", re.sub(r"(^|//)[^/]+@", r"\1[redacted]@", value))
    if isinstance(value, Mapping):
        return {key: shown(item) for key, item in value.items()}
    return [shown(item) for item in value] if isinstance(value, tuple | list) else value


def _mirrors(text: str) -> dict[str, list[str]]:
    pairs = (item.partition("=") for item in text.split())
    return {registry: mirrors.split(",") for registry, _, mirrors in pairs}


_OWN = ("cache_dir", "state_dir")
"""Folders that only one user can use."""
_FOLDERS = (*_OWN, "node_dir")
"""What would be the folder of whoever calls, if it were empty."""
_PLACES = (*_FOLDERS, "store", "sign_key", "verify_key", "credential_providers")
_SIZES = ("cache_limit", "cache_keep_free")
_FEW = 2
"""Slips in the name of a variable for which it is still told what was meant."""
_LEAST = 1 << 20
"""Bytes: no cache is smaller, so that a number below it is a slip."""
_OTHERS = tuple(
    f"BOOTSEER_{name}"
    for name in (
        *("ATTEMPT", "AUTO", "CHECKPOINT", "CONFIG", "CYCLE", "EVENTS", "FAULTS", "GPUS", "ID", "JOB", "NAME", "NODE"),
        *("NODES", "NODE_RANK", "RANK", "RESTARTS", "SPAN", "TRACEBACK"),
    )
)
"""Variables that are no settings."""
_LISTS: dict[str, Callable[[str], object]] = {
    "registry_mirrors": _mirrors,
    "pod_checkpoints": str.split,
    "plain_http": lambda text: [host for host in text.split(",") if host],
}
"""Settings that are lists, by how environment variables write them."""
