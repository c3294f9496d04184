from pathlib import Path

import pytest

from bootseer.stripefs import StripeFS, open_fs


@pytest.fixture
def fs(tmp_path: Path) -> StripeFS:
    """A striped store in a folder that the first write makes; modules of tests may have another one."""
    return open_fs(str(tmp_path / "store"))
