from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bootseer import oci
from bootseer.errors import DataError, NotFoundError
from bootseer.image import record as records
from bootseer.image.record import ImageRecord
from bootseer.store import open_store

GOLDEN = Path(__file__).parents[1] / "golden" / "image" / "record-v1.json"
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
    members=33_700,
    seconds={"unpack": 20.5, "build": 12.0, "publish": 30.25},
)


def test_the_golden_record_reads_as_it_did() -> None:
    assert msgspec.json.decode(GOLDEN.read_bytes(), type=ImageRecord) == RECORD
    assert msgspec.json.encode(RECORD) == GOLDEN.read_bytes()


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
        ({"version": 2}, "a newer bootseer made it"),
        ({"format": "x"}, "has format x"),
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
