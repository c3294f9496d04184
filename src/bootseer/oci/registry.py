"""A client of the OCI distribution API (v1.1) for one repository: manifests, tags, referrers, blobs and uploads.

Reads go to the mirrors configured for the registry first, in their order, and then to the registry itself; a mirror
that fails is left alone for ``REST`` seconds. Writes go to the registry. Everything here is safe to call from several
threads at once; waits and retries are those of `bootseer.oci.transport` and `bootseer.oci.endpoint`.

Where a registry keeps no list of the artifacts that refer to an image, the index tagged ``sha256-<hex>`` is that list
(distribution spec 1.1). There is no conditional write: an entry is added by reading, writing and looking again, and one
that another writer overwrote between is entered again. Two processes can still lose an entry when one writes long
after its read; bootseer finds its own objects by their own tags as well (`bootseer.objects.registry`)."""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from bootseer import config as settings
from bootseer.closing import Closing
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, UnavailableError
from bootseer.oci import hosts
from bootseer.oci.blobs import Blobs
from bootseer.oci.credentials import Logins
from bootseer.oci.endpoint import RETRIES, Again, Endpoint
from bootseer.oci.hosts import Host
from bootseer.oci.mirrors import Mirrors
from bootseer.oci.reference import Reference, is_host
from bootseer.oci.spec import INDEX, MANIFEST_TYPES, MAX_DOCUMENT, Descriptor, Index, decode, describe, digest_of
from bootseer.oci.transport import Answer, Transport
from bootseer.oci.uploads import Uploads
from bootseer.oci.wire import Origin, TransportError, number, onward
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

_PAGE = 1000
_MAX_PAGE = 64 << 20
_MAX_TAGS = 1_000_000
_MAX_PAGES = 10_000
"""Pages of one list: registries that ignore ``n`` send 100 tags each."""
_LINK = re.compile(r"<([^>]*)>([^<]*)")
_NEXT = re.compile(r';\s*rel\s*=\s*("[^"]*\bnext\b|next\b)', re.IGNORECASE)
_TRIES = 8
_SETTLE = 0.05
"""Seconds between writing an index and looking at it again: others that read before us have mostly written by then."""
_turns: dict[str, list[threading.Lock]] = {}


def turn(name: str, kind: str) -> threading.Lock:
    """The lock of ``name``, shared with some others of its ``kind``: threads that write the same go one by one. Nobody
    may take two of one kind. A ``key`` of a store may take an ``index``, not the other way round."""
    locks = _turns.setdefault(kind, [threading.Lock() for _ in range(64)])
    return locks[hash(name) % len(locks)]


class _Artifact(msgspec.Struct, frozen=True, rename="camel"):
    """What an index entry needs of a manifest."""

    config: Descriptor | None = None
    artifact_type: str = ""
    subject: Descriptor | None = None
    annotations: dict[str, str] | None = None


class _Entries(msgspec.Struct, frozen=True, rename="camel"):
    """An index with its entries byte for byte as others wrote them."""

    manifests: tuple[msgspec.Raw, ...] | None = ()
    schema_version: int = 2
    media_type: str = INDEX


class _Tags(msgspec.Struct, frozen=True):
    tags: list[str] | None = None


class Registry(Closing):
    """The repository of one reference. ``plain_http`` None: without TLS at loopback, and where the settings name it.

    ``mirrors``: ``[http[s]://]host[:port][/prefix]`` each; None: what the settings say for this registry, else
    `hosts`, which says also where it is itself. ``logins``: see `credentials.find`. ``stranger``: it is asked for
    somebody who is not of this machine: then it has no address of the machine's own, unless ``plain_http`` of the
    settings names it, nor what it leads to."""

    def __init__(
        self,
        ref: Reference,
        *,
        plain_http: bool | None = None,
        mirrors: Sequence[str] | None = None,
        logins: Logins | None = None,
        stranger: bool = False,
    ) -> None:
        self.ref, self._logins = ref, logins
        config = settings.load()
        self._without_tls = config.plain_http
        self._transport = Transport(self._without_tls if stranger else None)
        said = hosts.find(ref.registry)
        if stranger and said.server:  # who has no right of this machine's
            own = msgspec.structs.replace(said.server, client=(), header=())
            said = said._replace(server=own)
        plain = said.server.plain if said.server else None
        plain = ref.plain_http(self._without_tls) if plain is None else plain
        usual = hosts.usual(ref.registry)
        host = said.server.name if said.server else usual
        plain = plain if plain_http is None else plain_http
        # Another host gets no login of the registry.
        named, told = (ref.registry, "") if host in (ref.registry, usual) else (host, ref.registry)
        self._origin = self._endpoint(named, host, ref.name, plain, said.server, mirrors=told)
        if mirrors is None:
            mirrors = config.registry_mirrors.get(ref.registry)
        if mirrors is None:
            there = [
                self._endpoint(one.name, one.name, ref.name, bool(one.plain), one, mirrors=ref.registry)
                for one in said.mirrors
            ]
        else:
            there = [self._mirror(text) for text in mirrors]
        self._mirrors = Mirrors(there, self._origin)
        self._blobs = {endpoint: Blobs(endpoint) for endpoint in self._mirrors.all}
        self._uploads = Uploads(self._origin)

    def _mirror(self, text: str) -> Endpoint:
        scheme, _, rest = text.rpartition("://")
        host, _, prefix = rest.partition("/")
        if scheme not in ("", "http", "https") or not is_host(host):
            raise ConfigError(f"bad mirror {text!r} in registry_mirrors", hint="write [http[s]://]HOST[:PORT][/PREFIX]")
        plain = scheme == "http" if scheme else Reference(registry=host).plain_http(self._without_tls)
        name = "/".join(filter(None, (prefix.strip("/"), self.ref.name)))
        return self._endpoint(host, host, name, plain)

    def _endpoint(
        self, registry: str, host: str, name: str, plain: bool, said: Host | None = None, *, mirrors: str = ""
    ) -> Endpoint:
        made = Endpoint(
            registry,
            host,
            name,
            plain=plain,
            named=self._without_tls,
            transport=self._transport,
            logins=self._logins,
            said=said,
            mirrors=mirrors,
        )
        self._transport.connect_as(Origin.of(made.root), said)
        return made

    def __repr__(self) -> str:
        return f"<Registry {self._origin.base}>"

    def close(self) -> None:
        """Drop the kept connections."""
        self._transport.close()

    def manifest(
        self, selector: str, *, accept: Sequence[str] = MANIFEST_TYPES, fresh: bool = False
    ) -> tuple[bytes, Descriptor]:
        """The manifest or index named by a tag or digest: its bytes, and their descriptor with the recomputed digest
        and the media type that the registry and the document agree upon (empty: neither says).

        ``fresh``: ask no mirror, as it may be behind. Raises `DataError` for other bytes than the digest's, and
        for what is ambiguous (`spec.describe`)."""
        what = f"image {self._named(selector)}"
        if fresh:
            return self._manifest(self._origin, selector, what, accept)
        return self._mirrors.read(lambda endpoint: self._manifest(endpoint, selector, what, accept), selector, what)

    def _manifest(
        self, endpoint: Endpoint, selector: str, what: str, accept: Sequence[str]
    ) -> tuple[bytes, Descriptor]:
        headers = {"Accept": ", ".join(accept)}
        path = f"/manifests/{selector}"
        with endpoint.request("GET", path, what, headers=headers, limit=MAX_DOCUMENT) as answer:
            self._check_manifest(endpoint, answer, what)
            body, kind = answer.body, _media_type(answer)
        if len(body) > MAX_DOCUMENT:
            raise DataError(f"the manifest of {what} is more than {MAX_DOCUMENT} bytes")
        if ":" in selector and digest_of(body) != selector:  # a tag has no colon
            raise DataError(f"registry {endpoint.registry} returned other bytes for {what}")
        return body, describe(body, kind, f"manifest of {what}")

    def head_manifest(self, selector: str, *, retries: int | None = None) -> Descriptor:
        """Media type, digest and size of the manifest, without its bytes; the digest is the registry's word. A mirror
        is not asked: this says whether the registry itself lets us in."""
        what = f"image {self._named(selector)}"
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        path = f"/manifests/{selector}"
        with self._origin.request("HEAD", path, what, headers=headers, retries=retries) as answer:
            self._check_manifest(self._origin, answer, what)
            digest, size = answer.headers.get("docker-content-digest", ""), answer.headers.get("content-length", "")
            kind = _media_type(answer)
        if digest and (length := number(size)) is not None:
            return Descriptor(kind, digest, length)
        return self._manifest(self._origin, selector, what, MANIFEST_TYPES)[1]

    def _check_manifest(self, endpoint: Endpoint, answer: Answer, what: str) -> None:
        if answer.status == 404:
            answer.close()
            raise NotFoundError(
                f"{what} does not exist in registry {endpoint.registry}",
                hint="check its name and tag for typing errors",
            )
        endpoint.check(answer, what)

    def blob(self, item: Descriptor) -> Iterator[bytes]:
        """The blob's bytes, resumed after failures. Digest and size are the caller's to verify."""
        return self._read(item, lambda blobs, at, _: blobs.stream(item, at))

    @property
    def mirrored(self) -> bool:
        """Whether reads may be answered by a mirror."""
        return len(self._mirrors.all) > 1

    def leave_mirrors(self) -> bool:
        """Ask the registry itself for everything from now on; whether mirrors were asked until now."""
        left, self._mirrors = self.mirrored, Mirrors((), self._origin)
        return left

    def read_range(self, item: Descriptor, offset: int, length: int, *, fresh: bool = False) -> bytes:
        """Exactly ``length`` bytes of the blob from ``offset``, in one request on a kept connection.

        Few retries, as its callers have their own and other sources. Raises `DataError` (past the end, or an answer
        for another range), `UnavailableError`, `NotFoundError`, `PrivilegeError`. The bytes are not verified: who finds
        them damaged asks again, ``fresh``, past the mirrors; the one that gave them then rests."""
        if fresh:
            self._mirrors.damaged(item.digest)
            return b"".join(self._blobs[self._origin].pieces(item, offset, [length]))
        return b"".join(self.read_pieces(item, offset, [length]))

    def read_pieces(self, item: Descriptor, offset: int, lengths: Sequence[int]) -> Iterator[bytes]:
        """As `read_range`, in pieces of these lengths, each as soon as it is there. What fails after some of them is
        gone on with at the next mirror."""
        return self._read(item, lambda blobs, at, came: blobs.pieces(item, offset + at, lengths[came:]))

    def _read(self, item: Descriptor, ask: Callable[[Blobs, int, int], Iterator[bytes]]) -> Iterator[bytes]:
        """The pieces that ``ask`` gives at the first mirror that has them; ``ask`` gets the bytes and the pieces that
        came before, of mirrors that failed in the middle."""
        at = came = 0
        for endpoint in self._mirrors.candidates(item.digest):
            try:
                for piece in ask(self._blobs[endpoint], at, came):
                    if not came:
                        self._mirrors.served(endpoint, item.digest)
                    at += len(piece)
                    came += 1
                    yield piece
                return
            except BootseerError as exc:
                self._mirrors.failed(endpoint, exc, item.digest, f"blob {item.digest[:19]}")

    def has_blob(self, digest: str) -> bool:
        """Whether the registry itself has the blob. A redirect to its storage counts as yes."""
        what = f"blob {digest}"
        with self._origin.request("HEAD", f"/blobs/{digest}", what) as answer:
            if not self._origin.own(answer.url):
                return True
            if answer.status == 404:
                return False
            self._origin.check(answer, what)
            return True

    def put_blob(self, item: Descriptor, source: Path | bytes) -> bool:
        """Upload the content of ``source`` as blob ``item``; False when the registry has it already."""
        if self.has_blob(item.digest):
            return False
        self._uploads.put(item, source)
        return True

    def put_manifest(self, body: bytes, media_type: str, selector: str) -> str:
        """Store a manifest under a tag or its digest; returns the digest after reading it back. One with a ``subject``
        is also entered in the fallback index of that subject where the registry does not say that it did so itself."""
        what = f"manifest of {self._named(selector)}"
        indexed = self.store_manifest(body, media_type, selector)
        digest = digest_of(body)
        if self._manifest(self._origin, digest, what, MANIFEST_TYPES)[0] != body:
            raise DataError(f"registry {self.ref.registry} returned other bytes for the {what}")
        if not indexed:
            self._enter(body, media_type)
        return digest

    def _enter(self, body: bytes, media_type: str) -> None:
        """Enter the artifact manifest ``body`` in its subject's fallback index; nothing to do without a subject."""
        artifact = json_as(body, _Artifact)
        if artifact.subject is None:
            return
        kind = artifact.artifact_type or (artifact.config.media_type if artifact.config else "")
        entry = Descriptor(media_type, digest_of(body), len(body), annotations=artifact.annotations, artifact_type=kind)
        subject = artifact.subject.digest
        with turn(f"{self!r}@{subject}", "index"):
            for attempt in range(_TRIES):
                entries = self._entries(subject)
                if entry.digest in entries:
                    return
                entries[entry.digest] = msgspec.Raw(msgspec.json.encode(entry))
                index = msgspec.json.encode(_Entries(tuple(entries.values())))
                self.store_manifest(index, INDEX, _fallback_tag(subject))
                time.sleep(_SETTLE * (1 + attempt) * random.uniform(0.5, 1.5))
                if attempt:
                    log.info("the index of artifacts of %s was changed by others: %s again", subject, entry.digest)
        if entry.digest not in self._entries(subject):
            raise UnavailableError(
                f"cannot enter artifact {entry.digest} for {subject} in registry {self.ref.registry}: others keep"
                " changing the index",
                hint="run again",
            )

    def _entries(self, subject: str) -> dict[str, msgspec.Raw]:
        """The fallback index: digest -> entry, in order."""
        tag = _fallback_tag(subject)
        try:
            body, _ = self.manifest(tag, accept=(INDEX,), fresh=True)
        except NotFoundError:
            return {}
        try:
            items = json_as(body, _Entries).manifests or ()
            return {json_as(bytes(item), Descriptor).digest: item for item in items}
        except ValueError as exc:
            raise DataError(f"tag {tag} in registry {self.ref.registry} is no index of artifacts: {exc}") from None

    def store_manifest(self, body: bytes, media_type: str, selector: str) -> bool:
        """As `put_manifest`, without reading back and the fallback index; whether the registry entered its subject."""
        what, headers = f"manifest of {self._named(selector)}", {"Content-Type": media_type}
        path, failures = f"/manifests/{selector}", 0
        while True:
            with self._origin.request("PUT", path, what, headers=headers, body=body) as answer:
                # docker-registry 2.8 writes its links in place: while others store a manifest that this one lists, it
                # reads an empty link and says DIGEST_INVALID.
                detail = self._origin.detail(answer) if answer.status == 400 else ""
                if "DIGEST_INVALID" not in detail or failures == RETRIES:
                    self._origin.check(answer, what, writing=True, detail=detail)
                    return "oci-subject" in answer.headers
            failures += 1
            self._origin.pause(failures, Again(f"HTTP 400{detail}"), what)

    def delete_manifest(self, digest: str) -> bool:
        """Delete the manifest and with it its tags; False when the registry does not delete. No error when gone."""
        what = f"manifest {digest}"
        with self._origin.request("DELETE", f"/manifests/{digest}", what) as answer:
            if answer.status in (400, 405, 501):
                return False
            if answer.status != 404:
                self._origin.check(answer, what, writing=True)
            return True

    def tags(self) -> Iterator[str]:
        """All tags of the repository itself; none when there is no such repository."""
        what, count = f"tags of {self.ref.registry}/{self.ref.name}", 0
        for body in self._pages(f"/tags/list?n={_PAGE}", what, (404,), _MAX_PAGE):
            page = (decode(body, _Tags, f"the list of {what}").tags or []) if body is not None else []
            yield from page
            count += len(page)
            if count > _MAX_TAGS:
                return

    def referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Artifacts whose ``subject`` is the manifest ``digest``: of the referrers API, else of the fallback tag."""
        found: list[Descriptor] = []
        what = f"referrers of {digest}"
        # 2.8 of docker-registry: 404, others have been seen with 400.
        for body in self._pages(f"/referrers/{quote(digest, safe=':')}", what, (400, 404, 405), MAX_DOCUMENT):
            if body is None:
                entries = self._entries(digest).values()
                return tuple(json_as(bytes(entry), Descriptor) for entry in entries)
            found += decode(body, Index, f"{what} in registry {self.ref.registry}").manifests
        return tuple(found)

    def _pages(self, path: str, what: str, none: tuple[int, ...], limit: int) -> Iterator[bytes | None]:
        """The pages of a list from ``path`` on; None for a status of ``none``, and a page that was there ends it."""
        seen: set[str] = set()
        while path and path not in seen:
            if len(seen) >= _MAX_PAGES:
                raise DataError(f"registry {self.ref.registry} sends us through {what} without end")
            seen.add(path)
            with self._origin.request("GET", path, what, limit=limit) as answer:
                if answer.status in none:
                    yield None
                    return
                self._origin.check(answer, what)
                seen.add(answer.url)
                body, path = answer.body, next_page(answer)
            yield body

    def _named(self, selector: str) -> str:
        if selector == self.ref.selector:
            return str(self.ref)
        return f"{self.ref.registry}/{self.ref.name}{'@' if ':' in selector else ':'}{selector}"


def _media_type(answer: Answer) -> str:
    return answer.headers.get("content-type", "").partition(";")[0].strip().lower()


def _fallback_tag(digest: str) -> str:
    return digest.replace(":", "-")[:128]


def next_page(answer: Answer) -> str:
    """The URL in a ``Link: <...>; rel="next"`` header, or empty. It is on the server that answered: one behind a proxy
    writes the name that it has there itself."""
    for link in _LINK.finditer(", ".join(answer.headers.get_all("link") or [])):
        if _NEXT.search(link[2]):
            try:
                there = urlsplit(onward(answer.url, link[1]))
            except TransportError:
                return ""
            return urlunsplit((*urlsplit(answer.url)[:2], *there[2:4], ""))
    return ""
