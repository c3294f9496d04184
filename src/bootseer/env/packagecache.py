"""The package caches of a set-up command: restored before it runs, captured when it has succeeded. They are a help:
whatever goes wrong with them, the command runs with empty ones, or with none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bootseer.config import Config
from bootseer.env import cachekinds, generation, key
from bootseer.env.generation import Cache, Held
from bootseer.env.publication import Publication
from bootseer.env.spec import EnvSpec
from bootseer.errors import BootseerError, logged

log = logging.getLogger(__name__)

_PLACE = "/run/bootseer/packages"
_BYTES, _FILES = 32 << 30, 500_000
_FOR_EVER = 1 << 40
"""Nobody sees which packages a command uses: the limits alone say which go."""
_SECONDS, _END_SECONDS, _CANCEL_SECONDS = 600.0, 120.0, 20.0


class PackageCaches:
    """Those of ``names`` (`cachekinds`) for the command of ``spec``, which ``owner`` (user, group) runs."""

    def __init__(
        self, names: Sequence[str], spec: EnvSpec, owner: tuple[int, int], store_url: str, config: Config
    ) -> None:
        self._names, self._spec, self._owner = names, spec, owner
        self._store_url, self._config = store_url, config
        self.said = ""
        """How they began; empty when the command had not to run."""
        self.variables: dict[str, str] = {}
        """What the command gets now."""
        self.folder: Path | None = None
        """It is at ``place`` for the command now."""
        self.publication: Publication | None = None
        """Captures what was added."""
        self._held: Held | None = None
        self._code = 1

    def begin(self) -> None:
        """Restore them, in the mounts of this thread."""
        spec = self._spec
        try:
            cache = Cache(
                group="packages",
                path=_PLACE,
                owner=self._owner,
                tenant=self._config.tenant,
                facts={} if spec.contained else _facts(spec, self._config),
                image=spec.image_digest,
                salt=spec.salt,
                most_bytes=_BYTES,
                most_files=_FILES,
                generations=_FOR_EVER,
            )
            self._held = generation.restore(cache, self._store_url, self._config)
        except (BootseerError, OSError) as exc:
            log.warning("the set-up command runs without package caches: %s", exc)
            self.said = f"none: {exc}"
            return
        self.said, self.folder = self._held.said, self._held.folder
        self.variables, own = cachekinds.exported(self._names, self.place, spec.env)
        for name in own:
            log.info("the cache of %s is where the job's variables say, and left alone", name)
        if any("symlink" in word for word in (spec.env.get("UV_LINK_MODE", ""), *spec.command)):
            log.warning("uv is to link into its cache: that is not kept for other commands")
            self.variables.pop("UV_CACHE_DIR", None)

    @property
    def place(self) -> str:
        """Where the command sees ``folder``."""
        return _PLACE if self._spec.contained else str(self.folder)

    def run(self, command: Callable[[], int]) -> int:
        """Run ``command``; once more without them, when it failed and something in them could not be read."""
        self._code = command()
        if self._code and self._held and self._held.damaged:
            log.warning("the set-up command failed, and of the package caches not all could be read; without them now")
            self.said, self.variables, self.folder = "none: not all of them could be read", {}, None
            self._code = command()
        return self._code

    def end(self, *, beside: bool) -> None:
        """After a success have a process capture what was added, ``beside`` what follows. It gives the caches up; who
        ends it gives them up by `close`."""
        if self._held and self.folder and not self._code:
            with logged(log.warning, "the package caches are not captured"):
                self.publication = self._held.capture(last=True)
        if self.publication and not beside:
            self.publication.wait(_SECONDS)
        if not self.publication or not beside:
            self.close()

    @contextlib.contextmanager
    def seen_out(self) -> Iterator[None]:
        """At the end of a start wait until all is captured, unless the start is being broken off."""
        try:
            yield
            if self.publication:
                self.publication.wait(_END_SECONDS)
        finally:
            if self.publication:
                self.publication.cancel()
                self.publication.wait(_CANCEL_SECONDS)
            self.close()

    def close(self) -> None:
        """Give them up."""
        if self._held:
            with logged(log.warning, "the package caches stay on this node"):
                self._held.close()


def _facts(spec: EnvSpec, config: Config) -> dict[str, str]:
    """What decides on a host whether a built package fits."""
    return {"libc": key.libc_version(), "python": key.describe(key.find_python(spec), config).soabi}
