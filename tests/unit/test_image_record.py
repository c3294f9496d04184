from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bootseer import oci
from bootseer.errors import DataError, NotFoundError
from bootseer.image import record as records
from bootseer.image.record import ImageRecord
from bootseer.objects import open_store
from support.stores import FlakyStore

GOLDEN = Path(__file__).parents[1] / "golden" / "image"
RECORD = ImageRecord(
    image="sha256:" + "ab" * 32,
    platform="linux/amd64",
    reference="registry.example.org/team/torch:2.6",
    tree="cd" * 32,
    config=oci.ImageConfig(
        architecture="amd64",
        os="linux",
        rootfs=oci.RootFS(diff_ids=("sha256:" + "01" * 32,)),
        config=oci.ContainerConfig(
            env=("PATH=/bin", "X=ü"), entrypoint=("/bin/sh",), user="1000:1000", working_dir="/w"
        ),
        created="1970-01-01T00:00:00Z",
    ),
    layer_bytes=4_280_000_000,
    tree_bytes=5_800_000_000,
    stored_bytes=3_900_000_000,
    shared_bytes=1_000_000,
    packs=12,
    members=33_700,
    converted=1_800_000_000,
    seconds={"layers": 20.5, "tree": 2.0, "pack": 12.0, "publish": 0.25},
    kin=("ef" * 32,),
)


def test_the_golden_record_reads_as_it_did() -> None:
    assert msgspec.json.decode((GOLDEN / "record-v2.json").read_bytes(), type=ImageRecord) == RECORD
    assert msgspec.json.encode(RECORD) == (GOLDEN / "record-v2.json").read_bytes()


def test_first_publication_wins(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with pytest.raises(NotFoundError):
        records.load(store, RECORD.image, RECORD.platform)
    assert records.save(store, RECORD)
    assert not records.save(store, msgspec.structs.replace(RECORD, members=1))
    assert records.load(store, RECORD.image, RECORD.platform) == RECORD
    assert list(records.listing(store)) == [RECORD]
    assert [info.key for info in store.list("images")] == [f"images/{'ab' * 32}-linux-amd64.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version 3, the newest known is 2; a newer bootseer made it"),
        ({"version": 1}, "version 1, the newest known is 2"),
        ({"format": "x"}, "has format .x"),
        ({"image": "sha256:" + "00" * 32}, "describes another image"),
        ({"tree": 5}, "not an image record"),
    ],
)
def test_records_that_lie(tmp_path: Path, change: dict[str, object], message: str) -> None:
    store = open_store(str(tmp_path))
    document = {**msgspec.to_builtins(RECORD), **change}
    store.put(records.key_of(RECORD.image, RECORD.platform), msgspec.json.encode(document))
    with pytest.raises(DataError, match=message):
        records.load(store, RECORD.image, RECORD.platform)


def test_a_future_field_is_ignored(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    document = {**msgspec.to_builtins(RECORD), "later": 1}
    store.put(records.key_of(RECORD.image, RECORD.platform), msgspec.json.encode(document))
    assert records.load(store, RECORD.image, RECORD.platform) == RECORD


def config_of(layers: int) -> oci.ImageConfig:
    diff_ids = tuple(f"sha256:{number:064x}" for number in range(layers))
    return oci.ImageConfig(architecture="amd64", os="linux", rootfs=oci.RootFS(diff_ids=diff_ids))


def test_related_images_come_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(str(tmp_path))

    def add(number: int, layers: int, reference: str, converted: int) -> None:
        record = msgspec.structs.replace(
            RECORD,
            image=f"sha256:{number:064x}",
            tree=f"{number:064x}",
            config=config_of(layers),
            reference=reference,
            converted=converted,
        )
        assert records.save(store, record)

    add(1, 0, "registry.example.org/other:1", 50)
    add(2, 0, "registry.example.org/other:2", 70)
    add(3, 1, "registry.example.org/other:3", 10)
    add(4, 0, "registry.example.org/team/torch:2.5", 60)
    add(5, 0, "registry.example.org/team/torchy:1", 20)
    store.put("images/nonsense.json", b"{}")
    ref = oci.Reference.parse("registry.example.org/team/torch:2.6")
    found = records.related(store, ref, config_of(2))
    assert [int(tree, 16) for tree in found] == [3, 4, 2, 1, 5]
    assert "nonsense" in caplog.text
    flaky = FlakyStore(store)
    flaky.down = True
    assert records.related(flaky, ref, config_of(2)) == []
    assert "are not shared" in caplog.text


def test_a_slow_store_is_not_read_to_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    for number in range(40):
        assert records.save(
            store, msgspec.structs.replace(RECORD, image=f"sha256:{number:064x}", tree=f"{number:064x}")
        )
    ref = oci.Reference.parse("registry.example.org/team/torch:2.6")
    assert len(records.related(store, ref, config_of(2))) == 40
    monkeypatch.setattr(records, "_SECONDS", 0.0)
    assert len(records.related(store, ref, config_of(2))) == 16
    assert "is slow" in caplog.text


def test_a_bad_record_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(str(tmp_path))
    assert records.save(store, RECORD)
    store.put("images/0-linux-amd64.json", b'{"format":"bootseer-image","version":3}')
    assert list(records.listing(store)) == [RECORD]
    assert "images/0-linux-amd64.json" in caplog.text
