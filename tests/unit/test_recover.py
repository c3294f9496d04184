"""What becomes of a run that did not work: the words of its error."""

from bootseer.backends.engine.assignment import Assignment
from bootseer.backends.engine.datanodes import NodeState
from bootseer.backends.engine.model import Attempt, BlockRange, Outcome, Place, ReadRequest, Run, Tuning
from bootseer.backends.engine.retry import RetryPolicy
from bootseer.errors import BootseerError, DataError, UnavailableError


def tried(*results: tuple[str, Outcome, BootseerError | None]) -> str:
    """What is said of a run that was tried at these DataNodes, when there is nobody left."""
    nodes = {key: NodeState(key, f"{key}:9866") for key in "ab"}
    place, tuning, errors = Place("f", "ab"), Tuning(rounds=0, tries=1), []
    span = BlockRange(place, [0, 100])
    request = ReadRequest([span], "f")
    run: Run = span.cut(100)
    run.rounds = 1
    recovery = RetryPolicy([request], Assignment(nodes, tuning), tuning, lambda request, error: errors.append(error))
    for key, outcome, error in results:
        recovery.failed(run, Attempt("primary", nodes[key], place, 0, 100, run, False), outcome, error)
    recovery.requeue(run, 0.0)
    (found,) = errors
    return f"{type(found).__name__}: {found}"


def test_silence_of_all_datanodes_is_no_loss():
    stopped = ("a", Outcome.CANCELLED, None), ("b", Outcome.CANCELLED, None)
    said = "UnavailableError: cannot read f: no answer from DataNode b:9866; check that it runs"
    assert tried(*stopped).startswith(said)


def test_wrong_bytes_say_more_than_silence():
    damaged = ("a", Outcome.DAMAGED, DataError("chunk 3 is damaged"))
    refused = ("a", Outcome.FAILED, UnavailableError("refused"))
    silent = ("b", Outcome.CANCELLED, None)
    assert tried(damaged, silent) == "DataError: chunk 3 is damaged"
    assert tried(refused, silent).startswith("UnavailableError: cannot read f: no answer")
