"""Checkpoints of jobs with several ranks: FSDP2, resharding, on a folder and on HDFS; ranks that are killed."""

import uuid

import pytest

from bootseer.errors import DataError
from bootseer.stripefs import open_fs
from bootseer.stripefs.maintenance import check
from support import dcpjob, hadoop

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), pytest.param("hdfs", marks=pytest.mark.hdfs)])
def store(request, tmp_path) -> str:
    if request.param == "folder":
        return str(tmp_path / "run")
    return f"{hadoop.shared().url}/{uuid.uuid4().hex}"


def one(results: list[object]) -> object:
    assert len(set(results)) == 1, results
    return results[0]


def test_a_job_goes_on_with_another_number_of_ranks(store):
    four = one(dcpjob.run(4, "save", f"{store}/four"))
    fs = open_fs(store)
    assert fs.latest() == "four"
    assert [file.path for file in fs.checkpoint("four").files] == [".metadata", *(f"__{n}_0.distcp" for n in range(4))]
    assert fs.stat("four/__3_0.distcp").striped
    digest, step, loss = one(dcpjob.run(2, "load", f"{store}/four"))
    assert (digest, step) == (four, 2)
    two = one(dcpjob.run(2, "save", f"{store}/two"))
    assert one(dcpjob.run(4, "load", f"{store}/two"))[:2] == (two, 2)
    assert one(dcpjob.run(1, "load", f"{store}/four"))[0] == four
    assert loss > 0
    fs.verify()


def test_hybrid_sharding(tmp_path):
    saved = one(dcpjob.run(4, "save", f"{tmp_path}/hybrid", (2, 2)))
    assert one(dcpjob.run(4, "load", f"{tmp_path}/hybrid", (2, 2), True))[0] == saved
    assert one(dcpjob.run(2, "load", f"{tmp_path}/hybrid"))[0] == saved


@pytest.mark.parametrize("how", ["thread", pytest.param("process", marks=pytest.mark.soak)])
def test_async_save(tmp_path, how):
    saved = one(dcpjob.run(2, "save", f"{tmp_path}/run/step-1", (), how))
    assert open_fs(f"{tmp_path}/run").latest() == "step-1"
    assert one(dcpjob.run(2, "load", f"{tmp_path}/run/step-1"))[0] == saved


def test_what_torchs_own_writer_saved(store):
    saved = one(dcpjob.run(2, "save", f"bsx+{store if '://' in store else f'file://{store}'}/ck", (), "fsspec"))
    assert one(dcpjob.run(4, "load", f"{store}/ck"))[0] == saved


def test_ranks_with_different_things(tmp_path):
    dcpjob.run(4, "save_own", f"{tmp_path}/ck", 1)
    assert one(dcpjob.run(4, "load_own", f"{tmp_path}/ck", 1)) == ""


@pytest.mark.parametrize("how", ["ours", "torch"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_every_rank_needs_is_read_once(tmp_path, how):
    import torch
    from torch.distributed import checkpoint as dcp

    from bootseer.torch import StorageWriter

    size = 5_000_000
    ours = StorageWriter(f"{tmp_path}/ck", width=3, unit=dcpjob.UNIT)
    theirs = dcp.FileSystemWriter(f"{tmp_path}/ck", sync_files=False)
    dcp.save({"w": torch.arange(float(size))}, storage_writer=ours if how == "ours" else theirs)
    found = dcpjob.run(4, "load_shared", f"{tmp_path}/ck", size)
    assert all(right for right, _, _ in found)
    assert {calls for _, _, calls in found} == {1 if how == "ours" else 2}
    # torch's: the two ends of the tensor tell where its elements are, and each is in a chunk of 1 MiB
    assert sum(read for _, read, _ in found) <= 1.02 * 4 * size + (0 if how == "ours" else 2 << 20)


POINTS = [
    (1, "write.stripe@1"), (1, "write.close@1"), (1, "write.intent@1"), (0, "write.verify@1"), (1, "write.rename@1"),
    (1, "write.cleanup@1"), (0, "save.claim@1"), (0, "write.rename@2"), (0, "save.claim@2"), (0, "commit.begin@1"),
    (0, "commit.write@1"), (0, "commit.rename@1"),
]  # fmt: skip
"""Which rank is killed, and where, before the checkpoint is one. The coordinator's second claim is that of the commit,
its second rename that of ``.metadata``."""


def test_a_rank_killed_at_every_step_of_a_save(store):
    dcpjob.run(2, "save_own", f"{store}/step-1", 1)
    fs = open_fs(store)
    for rank, point in POINTS if "://" not in store else POINTS[::5]:
        dcpjob.run(2, "save_own", f"{store}/step-2", 7, kill=(rank, f"stripefs.{point}"))
        assert fs.latest() == "step-1", point
        with pytest.raises(DataError, match="has no COMMIT"):
            fs.checkpoint("step-2")
        for said in dcpjob.run(2, "load_own", f"{store}/step-2", 7, fails=True):
            assert "has no COMMIT" in said
    # the job starts again: the old checkpoint is whole, and the new one goes to the same folder
    assert one(dcpjob.run(2, "load_own", f"{store}/step-1", 1)) == ""
    dcpjob.run(2, "save_own", f"{store}/step-2", 2)
    assert fs.latest() == "step-2"
    assert one(dcpjob.run(2, "load_own", f"{store}/step-2", 2)) == ""
    assert check.fsck(fs.backend).errors == ()
    fs.verify()
    dcpjob.run(2, "save_own", f"{store}/step-3", 3, kill=(0, "stripefs.commit.published@1"))
    assert fs.latest() == "step-3"
    assert one(dcpjob.run(2, "load_own", f"{store}/step-3", 3)) == ""


def test_errors_come_to_every_rank(tmp_path):
    dcpjob.run(2, "save_own", f"{tmp_path}/ck", 1)
    for said in dcpjob.run(2, "save_own", f"{tmp_path}/ck", 2, fails=True):
        assert "has a COMMIT already; save to a new folder" in said
    for said in dcpjob.run(2, "load_own", f"{tmp_path}/missing", 1, fails=True):
        assert "no file or folder missing" in said
