"""What hdfs-native does not tell of a file and is found out otherwise, with doubles for its client."""

from collections.abc import Callable
from typing import cast

import pytest

from bootseer.backends.hdfs_native import still_written
from bootseer.errors import BootseerError, NotFoundError, NotWritableError, UnavailableError
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.records import FileStatus

BLOCK = 1 << 20


class Answers:
    """``space``: what each look at the space says; ``sizes``: lengths of the readers that are opened meanwhile."""

    def __init__(self, *space: int | BootseerError, sizes: tuple[int, ...] = (), replication: int = 2) -> None:
        self._space, self._sizes, self._replication = list(space), list(sizes), replication
        self.asked: list[str] = []
        self.size = 0

    def info(self, path: str) -> FileStatus:
        self.asked.append("info")
        return FileStatus(path, 0, False, 0, replication=self._replication, block_size=BLOCK)

    def consumed(self, path: str) -> int:
        self.asked.append("space")
        if isinstance(said := self._space.pop(0), BootseerError):
            raise said
        return said

    def open(self, path: str) -> "Answers":
        self.asked.append("open")
        self.size = self._sizes.pop(0)
        return self


def told(answers: Answers, size: int = 10) -> bool | None:
    return still_written(cast(HdfsClient, answers), "/f", size)


@pytest.mark.parametrize(
    ("make", "says", "operations"),
    [
        (lambda: Answers(20), False, 2),
        (lambda: Answers(20 + 2 * BLOCK), True, 2),
        (lambda: Answers(17, replication=1), None, 2),
        (lambda: Answers(17, 2 * 30, sizes=(30,)), False, 4),
        (lambda: Answers(17, 17, 17, sizes=(30, 30)), None, 6),
        (lambda: Answers(NotWritableError("permission denied")), None, 2),
    ],
)
def test_whether_a_file_is_still_written(make: Callable[[], Answers], says: bool | None, operations: int) -> None:
    answers = make()
    assert told(answers) is says
    assert len(answers.asked) == operations


@pytest.mark.parametrize("error", [UnavailableError("silent"), NotFoundError("gone")])
def test_what_does_not_answer_is_an_error(error: BootseerError) -> None:
    with pytest.raises(type(error)):
        told(Answers(error))
