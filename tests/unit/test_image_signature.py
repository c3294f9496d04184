"""Signed images: who may write to the store, but has no key, cannot have a node use anything but what was converted."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from typer.testing import CliRunner

from bootseer import image
from bootseer.blocks.extract.tree import extract
from bootseer.blocks.metadata import localize
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import ObjectRef
from bootseer.chunks.manifest import TreeManifest, tree_key
from bootseer.cli.image import app
from bootseer.config import Config
from bootseer.errors import ConfigError, DataError, NotFoundError, UnsupportedError
from bootseer.image import record as records
from bootseer.image.record import ImageRecord
from bootseer.objects import signature
from bootseer.objects.folder import FolderStore
from bootseer.objects.signature import UnsignedError
from support import forked
from support.images import Member, folder, write_image

GOLDEN = Path(__file__).parents[1] / "golden" / "image"
ONE = [folder("bin"), Member("bin/train", data=b"train the model" * 9_000)]
TWO = [folder("bin"), Member("bin/train", data=b"send the data off" * 9_000)]


def private_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    how = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)


class Site:
    """A store, two images, the site's key and somebody else's."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.store = FolderStore(place / "store")
        self.keys = {}
        for number, name in enumerate(("site", "other")):
            key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
            (place / f"{name}.key").write_bytes(private_pem(key))
            public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            (place / f"{name}.pub").write_bytes(public)
            self.keys[name] = key
        for tag, layer in (("one", ONE), ("two", TWO)):
            write_image(place / "layout", [layer], tag=tag)

    def ref(self, tag: str = "one") -> str:
        return f"oci:{self.place}/layout:{tag}"

    def convert(self, tag: str = "one", key: str = "site") -> image.Ensured:
        sign_key = self.place / f"{key}.key" if key else None
        return image.ensure(self.ref(tag), self.store.url, work_dir=self.place / "work", sign_key=sign_key)

    def resolve(self, tag: str = "one", key: str = "site") -> ImageRecord:
        config = Config(verify_key=str(self.place / f"{key}.pub") if key else "")
        return image.resolve(self.ref(tag), self.store.url, config=config)

    def stored(self, record: ImageRecord) -> bytes:
        return self.store.get(records.key_of(record.image, record.platform), most=1 << 30)

    def replace(self, record: ImageRecord, raw: bytes) -> None:
        """Put ``raw`` in the place of the stored record, with the check that a record of that content has."""
        raw = raw.rpartition(b',"check":"')[0] or raw
        raw += b',"check":"' + hashing.hexdigest(raw + b"}").encode() + b'"}'
        self.store.put(records.key_of(record.image, record.platform), raw, overwrite=True)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_signed_image_is_used_and_any_other_is_not(site: Site) -> None:
    record = site.convert().record
    assert site.resolve() == record
    assert site.resolve(key="") == record, "who has no key reads it all the same"
    with pytest.raises(UnsignedError, match="not signed by a key that is trusted"):
        site.resolve(key="other")
    site.convert("two", key="")
    with pytest.raises(UnsignedError, match=r"is not signed;.*--sign-key"):
        site.resolve("two")
    assert site.resolve("two", key="").image


def test_the_golden_signed_record(site: Site) -> None:
    record = msgspec.json.decode((GOLDEN / "record-v2.json").read_bytes(), type=ImageRecord)
    assert records.save(site.store, record, key=site.keys["site"])
    golden = (GOLDEN / "record-v2-signed.json").read_bytes()
    assert site.stored(record) == golden
    signed, _, rest = golden.partition(b',"signature":"')
    assert signed + b"}" == (GOLDEN / "record-v2.json").read_bytes(), "this is what is signed"
    assert set(msgspec.json.decode(b'{"signature":"' + rest)) == {"signature", "check"}
    keys = signature.trusted_keys(Config(verify_key=str(site.place / "site.pub")))
    assert records.load(site.store, record.image, record.platform, keys) == record


@pytest.mark.parametrize(
    "change", ["tree", "config", "stripped", "signed by other", "cut", "appended", "beside", "no base64"]
)
def test_a_record_that_was_replaced_is_refused(site: Site, change: str) -> None:
    record, evil = site.convert().record, site.convert("two", key="").record
    raw = site.stored(record)
    if change == "tree":
        raw = raw.replace(record.tree.encode(), evil.tree.encode())
    elif change == "config":
        raw = raw.replace(b'"config":{', b'"config":{"Entrypoint":["/bin/evil"],')
    elif change == "stripped":
        raw = msgspec.json.encode(msgspec.structs.replace(record, tree=evil.tree))[:-1]
    elif change == "signed by other":
        forged = msgspec.structs.replace(record, tree=evil.tree)
        records.save(site.store, forged, overwrite=True, key=site.keys["other"])
        raw = site.stored(record)
    elif change == "cut":
        raw = raw.partition(b',"check"')[0][:-5] + b'"'
    elif change == "appended":
        raw = raw.partition(b',"check"')[0] + f',"tree":"{evil.tree}"'.encode()
    elif change == "beside":  # the later field wins where a document has two of one name
        raw = b'{"tree":"' + evil.tree.encode() + b'",' + raw.partition(b',"check"')[0][1:]
    else:
        raw = raw.replace(b',"signature":"', b',"signature":"\xc3\xbc')
    site.replace(record, raw)
    with pytest.raises(UnsignedError) as caught:
        site.resolve()
    assert caught.value.exit_code == 65


def test_the_signature_of_one_image_is_none_of_another(site: Site) -> None:
    evil, record = site.convert("two").record, site.convert().record
    genuine = site.stored(record)
    site.store.put(records.key_of(record.image, record.platform), site.stored(evil), overwrite=True)
    with pytest.raises(DataError, match="describes another image"):
        site.resolve()
    site.replace(record, site.stored(evil).replace(evil.image.encode(), record.image.encode()))
    with pytest.raises(UnsignedError):
        site.resolve()
    other = msgspec.structs.replace(record, platform="linux/other")
    site.store.put(records.key_of(record.image, other.platform), genuine, overwrite=True)
    keys = signature.trusted_keys(Config(verify_key=str(site.place / "site.pub")))
    with pytest.raises(DataError, match="describes another image"):
        records.load(site.store, record.image, other.platform, keys)


@pytest.mark.parametrize("part", ["manifest", "map", "meta_stored", "pack"])
def test_what_a_signed_record_names_is_bound_with_it(site: Site, part: str) -> None:
    record, evil = site.convert().record, site.convert("two", key="").record

    def parts(tree: str) -> dict[str, str]:
        manifest = TreeManifest.decode(site.store.get(tree_key(tree), most=1 << 30), tree)
        (pack,) = localize(site.store, tree, site.place / tree[:8]).map.packs
        found_parts: dict[str, ObjectRef] = {"map": manifest.map, "meta_stored": manifest.meta_stored, "pack": pack}
        return {"manifest": tree_key(tree), **{name: ref.key for name, ref in found_parts.items()}}

    theirs = site.store.get(parts(evil.tree)[part], most=1 << 30)
    site.store.put(parts(record.tree)[part], theirs, overwrite=True)
    assert site.resolve() == record
    with pytest.raises(DataError):
        extract(site.store, record.tree, site.place / "out")
    assert [path for path in (site.place / "out").rglob("*") if path.is_file()] == []


def test_both_keys_are_trusted_while_they_change(site: Site) -> None:
    both = site.place / "both.pub"
    both.write_bytes(b"# old\n" + (site.place / "other.pub").read_bytes() + (site.place / "site.pub").read_bytes())
    site.convert()
    site.convert("two", key="other")
    assert site.resolve(key="both").image != site.resolve("two", key="both").image


def test_a_record_that_another_node_replaces_in_this_moment_is_converted_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two steps of `Store.replace` there is none."""
    site.convert(key="")
    get = FolderStore.get

    def last(self: FolderStore, key: str, *, most: int) -> bytes:
        data = get(self, key, most=most)
        if key.startswith("images/"):
            self.delete(key)
        return data

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "get", last)
        made = site.convert()
    assert made.fresh
    assert site.resolve() == made.record


def test_an_unsigned_record_is_never_signed_but_made_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    record, evil = site.convert(key="").record, site.convert("two", key="").record
    site.replace(record, site.stored(record).replace(record.tree.encode(), evil.tree.encode()))
    again, fresh = site.convert()
    assert fresh
    assert "is not signed; converting again" in caplog.text
    assert again.tree == record.tree
    assert site.resolve() == again
    assert not site.convert().fresh
    assert site.convert(key="other").fresh
    assert not site.convert(key="").fresh


def test_a_signature_that_nothing_can_verify_is_an_error(site: Site) -> None:
    site.convert()
    with pytest.raises(ConfigError, match=r"no key to verify.*verify_key"):
        image.resolve(site.ref(), site.store.url, config=Config(require_signature=True))
    with pytest.raises(ConfigError, match="no key to verify"):
        image.resolve(site.ref(), site.store.url, config=Config().trusting("", True))
    trusting = Config(verify_key="gone").trusting(str(site.place / "site.pub"), True)
    assert image.resolve(site.ref(), site.store.url, config=trusting).image


def test_the_settings_of_the_node_count_where_none_are_given(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.convert(key="")
    monkeypatch.setenv("BOOTSEER_VERIFY_KEY", str(site.place / "site.pub"))
    with pytest.raises(UnsignedError):
        image.resolve(site.ref(), site.store.url)


def bad_keys(site: Site) -> dict[str, bytes]:
    curve = ec.generate_private_key(ec.SECP256R1())
    return {
        "empty": b"",
        "text": b"this is secret-text",
        "truncated": (site.place / "site.key").read_bytes()[:60],
        "encrypted": private_pem(site.keys["site"], b"password"),
        "curve": private_pem(curve),
        "curve public": curve.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "swapped": b"",
        "half": (site.place / "site.pub").read_bytes().replace(b"MC", b"MD") + (site.place / "site.pub").read_bytes(),
        "gone": b"",
    }


@pytest.mark.parametrize(
    "name", ["empty", "text", "truncated", "encrypted", "curve", "curve public", "swapped", "half", "gone"]
)
def test_what_is_no_key_is_one_line_without_the_key(site: Site, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = site.place / "bad"
    path.write_bytes(bad_keys(site)[name])
    if name == "gone":
        path.unlink()
    caplog.set_level(logging.DEBUG)
    messages = []
    for use in (
        lambda: signature.signing_key(site.place / "site.pub" if name == "swapped" else path),
        lambda: signature.trusted_keys(Config(verify_key=str(site.place / "site.key" if name == "swapped" else path))),
    ):
        with pytest.raises(NotFoundError if name == "gone" else ConfigError) as caught:
            use()
        assert "\n" not in str(caught.value)
        messages.append(str(caught.value))
    secret = "".join((site.place / "site.key").read_text().splitlines()[1:-1])
    assert not any(part in text for text in (*messages, caplog.text) for part in ("secret-text", secret, secret[:20]))


def test_a_node_without_the_package_fails_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.convert()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    for use in (site.resolve, site.convert):
        with pytest.raises(UnsupportedError, match=r"pip install 'bootseer\[sign\]'"):
            use()
    assert site.resolve(key="").image, "who needs no signature needs no package"


def test_a_mount_is_refused_before_anything_of_the_image_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    record = site.convert(key="").record
    site.store.delete(tree_key(record.tree))
    state = {"cache_dir": str(site.place / "cache"), "state_dir": str(site.place / "state")}
    config = Config(**state, verify_key=str(site.place / "site.pub"))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(UnsignedError):
        image.mount(site.ref(), site.place / "target", store_url=site.store.url, config=config)
    assert not (site.place / "target").exists()


def test_the_command_line_signs_and_verifies(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_STORE", site.store.url)
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(site.place / "cache"))

    def call(*args: str) -> None:
        done = CliRunner().invoke(app, args)
        if done.exception is not None:
            raise done.exception

    public, foreign = str(site.place / "site.pub"), str(site.place / "other.pub")
    call("convert", site.ref(), "--sign-key", str(site.place / "site.key"))
    with pytest.raises(UnsignedError):
        call("extract", site.ref(), str(site.place / "bad"), "--verify-key", foreign)
    with pytest.raises(ConfigError, match="no key to verify"):
        call("extract", site.ref(), str(site.place / "bad"), "--require-signature")
    assert not (site.place / "bad").exists()
    call("extract", site.ref(), str(site.place / "good"), "--verify-key", public, "--require-signature")
    assert (site.place / "good/bin/train").read_bytes() == ONE[1].data
    monkeypatch.setenv("BOOTSEER_VERIFY_KEY", foreign)
    for verb in (["ls"], ["extract", "--file", "bin/train"], ["touched"]):
        with pytest.raises(UnsignedError):
            call(*verb, site.ref())
    monkeypatch.setenv("BOOTSEER_SIGN_KEY", str(site.place / "other.key"))
    call("convert", site.ref())
    call("extract", site.ref(), "--file", "bin/train")


@pytest.mark.root
def test_the_keys_of_a_job_file_count(site: Site) -> None:
    site.convert()
    file = site.place / "job.toml"
    names = {"STORE": site.store.url, "CACHE_DIR": str(site.place / "cache"), "STATE_DIR": str(site.place / "state")}
    environ = {**os.environ, **{f"BOOTSEER_{name}": value for name, value in names.items()}}

    def start(key: str) -> tuple[int, str]:
        file.write_text(f'[job]\nname = "j"\ncommand = ["true"]\n[image]\nref = "{site.ref()}"\n{key}\n')
        done = forked.cli("run", file, "--events", site.place / "events", env=environ)
        return done.returncode, done.stderr

    code, said = start(f'verify_key = "{site.place}/other.pub"')
    assert (code, "not signed by a key that is trusted" in said) == (65, True)
    code, said = start("require_signature = true")
    assert (code, "there is no key" in said) == (78, True)
    assert "Traceback" not in said
