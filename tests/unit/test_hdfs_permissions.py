"""Which modes a node shows for those of HDFS: never more than HDFS grants."""

import pytest

from bootseer.backends.hdfs_rights import permissions
from bootseer.hdfs.records import FileStatus


@pytest.mark.parametrize(
    ("mode", "told", "expected"),
    [
        (0o644, {}, 0o644),
        (0o1777, {}, 0o1777),
        (0o604, {}, 0o600),  # the group may have members that only the NameNode knows
        (0o640, {"group": "strangers-of-this-node"}, 0o600),
        (0o1777, {"group": "strangers-of-this-node"}, 0o1707),
        (0o755, {"owner": "stranger-of-this-node"}, 0o055),
        (0o1775, {"acl": True}, 0o1700),
        (0o777, {"encrypted": True}, 0),
    ],
)
def test_modes(mode, told, expected):
    status = FileStatus("/a", 0, True, 0, **({"owner": "nobody", "group": "nogroup", "mode": mode} | told))
    assert permissions(status).mode == expected
