"""Which variables of the host a job's container gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bootseer
from bootseer import image, oci
from bootseer.image import user
from bootseer.image.container import Bind
from bootseer.launch.container import Container
from bootseer.launch.job import ImageTable, Job, JobTable

NEEDED = {
    "RANK": "3",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "NVRX_CYCLE": "1",
    "NCCL_SOCKET_IFNAME": "ib0",
    "NCCL_IB_HCA": "mlx5",
    "SLURM_JOB_ID": "48",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n5",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_NAME": "train",
}
SECRET = [
    "SLURM_JWT",
    "SLURM_SPANK__SLURM_SPANK_OPTION_auks_token",
    "SLURM_API_KEY",
    "SLURM_JOB_ID_TOKEN",
    "SLURM_JWT_HET_GROUP_0",
    "MASTER_PASSWORD",
    "MASTER_ADDR_TOKEN",
    "TORCHELASTIC_TOKEN",
    "NCCL_AUTH_TOKEN",
    "NCCL_SECRET",
    "CUDA_VISIBLE_TOKEN",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "BOOTSEER_CONFIG",
]


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_job_gets_what_frameworks_need_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    seen: dict[str, str] = {}

    def run(*_: object, env: dict[str, str], **__: Any) -> int:
        seen.update(env)
        return 0

    monkeypatch.setattr(image.runtime, "run", run)
    monkeypatch.setattr(user, "run", run)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    for name, value in NEEDED.items():
        monkeypatch.setenv(name, value)
    for name in SECRET:
        monkeypatch.setenv(name, "secret")
    (tmp_path / "events").mkdir()
    job = Job(
        job=JobTable(name="j", command=["train"], env={"WANDB_API_KEY": "the user's own"}), image=ImageTable(ref="x")
    )
    config = oci.ImageConfig(architecture="", os="linux", rootfs=oci.RootFS(diff_ids=()))
    Container(job, tmp_path, config, tmp_path / "events/n.jsonl", {}, None).run(["train"])
    assert NEEDED.items() <= seen.items()
    assert seen["WANDB_API_KEY"] == "the user's own"
    assert "secret" not in seen.values(), sorted(name for name in SECRET if name in seen)


def test_the_emitters_are_shown_by_their_real_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path(bootseer.__file__).resolve().parent
    (tmp_path / "installed").symlink_to(real.parent)
    monkeypatch.setattr(bootseer, "__file__", str(tmp_path / "installed/bootseer/__init__.py"))
    seen: list[Bind] = []
    monkeypatch.setattr(image.runtime, "run", lambda *_, mounts, **__: seen.extend(mounts) or 0)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (tmp_path / "events").mkdir()
    job = Job(job=JobTable(name="j", command=["train"]), image=ImageTable(ref="x"))
    config = oci.ImageConfig(architecture="", os="linux", rootfs=oci.RootFS(diff_ids=()))
    Container(job, tmp_path, config, tmp_path / "events/n.jsonl", {}, None).run(["train"])
    assert str(real) in [mount.source for mount in seen]
