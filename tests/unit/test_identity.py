import pytest

from bootseer.errors import ConfigError
from bootseer.launch.identity import identify


def test_slurm_torchrun_and_kubernetes():
    slurm = identify("j", {"SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "n3"})
    assert (slurm.rank, slurm.attempt, slurm.node, slurm.job) == (3, 2, "n3", "j")
    assert identify("j", {"GROUP_RANK": "5", "TORCHELASTIC_RESTART_COUNT": "1"}).attempt == 1
    assert identify("j", {"JOB_COMPLETION_INDEX": "7"}).rank == 7


def test_our_own_variables_win():
    found = identify("j", {"BOOTSEER_JOB": "k", "BOOTSEER_NODE_RANK": "1", "SLURM_NODEID": "3", "BOOTSEER_NODE": "me"})
    assert (found.job, found.rank, found.node) == ("k", 1, "me")
    assert found.environ(8)["BOOTSEER_GPUS"] == "8"
    assert "BOOTSEER_RANK" not in found.environ(8), "a process's rank is its framework's to say"


def test_an_attempt_that_nobody_named_is_counted_by_the_launcher():
    assert identify("j", {}).attempt == -1


def test_not_a_number():
    with pytest.raises(ConfigError, match="SLURM_NODEID"):
        identify("j", {"SLURM_NODEID": "three"})
