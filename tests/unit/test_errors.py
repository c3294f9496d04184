import errno
import inspect
import re
from pathlib import Path

import pytest

from bootseer import errors

TABLE = Path(__file__).parents[2] / "docs/reference/exit-codes.md"
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.BootseerError)]


def test_every_exit_code_is_documented_and_no_other():
    documented = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| `(\w+)`", TABLE.read_text(), re.M)}
    assert documented == {c.__name__: c.exit_code for c in CLASSES}


def test_message_and_hint_make_one_line():
    assert str(errors.NotFoundError("no image x", hint="push it")) == "no image x; push it"
    assert str(errors.NotFoundError("no image x")) == "no image x"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, errors.FullError),
        (errno.EDQUOT, errors.FullError),
        (errno.EACCES, errors.NotWritableError),
        (errno.EROFS, errors.NotWritableError),
        (errno.EEXIST, errors.NotWritableError),
        (errno.EISDIR, errors.NotWritableError),
        (errno.ENOENT, errors.NotFoundError),
        (errno.ECONNREFUSED, errors.UnavailableError),
        (errno.EIO, errors.BootseerError),
    ],
)
def test_os_errors_become_errors_with_an_exit_code(number, kind):
    made = errors.from_os_error(OSError(number, "words"), "write there")
    assert type(made) is kind
    assert str(made).startswith("cannot write there: words")
