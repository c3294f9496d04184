import threading

from bootseer.launch.ready import ReadyWatch
from bootseer.profile import emit


def test_ready_when_a_first_step_ends_and_only_once(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    monkeypatch.setenv("BOOTSEER_EVENTS", str(file))
    with emit.span("first_step"):
        pass
    earlier = file.stat().st_size
    calls: list[int] = []
    called = threading.Event()
    watch = ReadyWatch(file, lambda: (calls.append(1), called.set())[0])
    watch.start(earlier)
    with emit.span("import"):
        pass
    step = emit.begin("first_step")
    assert not called.wait(0.2)
    emit.end(step)
    assert called.wait(5)
    with emit.span("first_step"):
        pass
    watch.stop()
    assert calls == [1]


def test_all_ranks_of_the_node_are_waited_for(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    monkeypatch.setenv("BOOTSEER_EVENTS", str(file))
    watch = ReadyWatch(file, lambda: None)
    watch.start()
    first, second = emit.begin("first_step", node_ranks=2), emit.begin("first_step", node_ranks=2)
    emit.end(first)
    assert not watch.ready.wait(0.3)
    emit.end(second)
    assert watch.ready.wait(10)
    watch.stop()
    early = ReadyWatch(file, lambda: None)
    early.start(file.stat().st_size)
    emit.end(emit.begin("first_step", node_ranks=2))
    early.stop()  # the job has ended
    assert early.ready.is_set()


def test_a_job_that_ends_at_once_is_still_seen(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    watch = ReadyWatch(file, lambda: None)
    watch.start()
    monkeypatch.setenv("BOOTSEER_EVENTS", str(file))
    with emit.span("first_step"):
        pass
    watch.stop()
    assert watch.ready.is_set()


def test_a_line_that_is_no_utf8_ends_nothing(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"ev":"begin","stage":"env","span":"\xff"}\n')
    monkeypatch.setenv("BOOTSEER_EVENTS", str(file))
    with emit.span("first_step"):
        pass
    watch = ReadyWatch(file, lambda: None)
    watch.start()
    assert watch.ready.wait(10)
    watch.stop()


def test_no_first_step_no_ready(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"bootseer":2,"ev":"begin","stage":"first_step","span":"x"}\ngarbage\n')
    watch = ReadyWatch(tmp_path / "events.jsonl", lambda: None)
    watch.start()
    watch.stop()
    assert not watch.ready.is_set()
