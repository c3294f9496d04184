"""Which variables of the host a job's container gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import bootseer
from bootseer import image, oci, rootless
from bootseer.errors import ConfigError
from bootseer.image import user
from bootseer.image.container import Bind
from bootseer.launch import job as job_file
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


def test_a_job_gets_what_it_names_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {
        "HF_TOKEN": "t",
        "WANDB_API_KEY": "w",
        "WANDB_MODE": "of the host",
        "HF_HOME": "not named",
        "XLA_FLAGS": "x",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GONE", raising=False)
    job = job_file.load(
        written(
            tmp_path, 'pass = ["HF_TOKEN", "WANDB_*", "XLA_FLAGS", "GONE", "NONE_*"]\nenv = {WANDB_MODE = "offline"}'
        )
    )[0]
    config = oci.ImageConfig(architecture="", os="linux", rootfs=oci.RootFS(diff_ids=()))
    made = Container(job, tmp_path, config, tmp_path / "events/n.jsonl", {}, None)
    seen = {name: value for name, value in made.variables.items() if name in given}
    assert seen == {"HF_TOKEN": "t", "WANDB_API_KEY": "w", "WANDB_MODE": "offline", "XLA_FLAGS": "x"}
    assert made.noted.keys() & given == {"WANDB_MODE"}
    assert [record.getMessage() for record in caplog.records] == ["the job is to get GONE, which is not set here"]


@pytest.mark.parametrize(
    "said",
    ['pass = ["*"]', 'pass = ["A*B"]', 'pass = ["A=secret"]', 'pass = ["?"]', 'pass = ["1A"]', 'pass = [""]',
     'pass = ["T*"]\n[env]\ncommand = ["x"]\ntargets = ["/t"]\nkey_env = ["TOKEN"]'],
)  # fmt: skip
def test_only_names_are_passed_and_none_is_in_a_key(tmp_path: Path, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        job_file.load(written(tmp_path, said))
    assert "pass" in str(told.value) or "TOKEN" in str(told.value)


def written(folder: Path, more: str) -> Path:
    path = folder / "job.toml"
    path.write_text(f'image = {{ref = "x"}}\n[job]\nname = "j"\ncommand = ["train"]\n{more}\n')
    return path


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


def test_the_value_of_a_variable_that_is_no_text_is_in_no_message() -> None:
    env = {"PATH": "/bin", "TOKEN": "hush" + os.fsdecode(b"\xff")}
    command = rootless.Command(root="/", argv=["true"], env=env, shown=[], folders=["/"])
    with pytest.raises(ConfigError, match="'TOKEN' is no text in UTF-8") as caught:
        rootless.run(command)
    assert "hush" not in str(caught.value)
