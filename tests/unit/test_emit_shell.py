"""The POSIX shell emitter, in every shell there is here."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bootseer.profile import emit, events

SCRIPT = Path(emit.__file__).with_name("emit.sh")
SHELLS = {"dash": ["dash"], "bash": ["bash"], "bash-posix": ["bash", "--posix"], "busybox": ["busybox", "sh"]}


@pytest.fixture(params=SHELLS)
def shell(request):
    argv = SHELLS[request.param]
    if not shutil.which(argv[0]):
        pytest.skip(f"{argv[0]} is not installed")
    return argv


@pytest.fixture
def sh(shell, tmp_path):
    def run(script, *, flags="-eu", environ=None, check=True):
        env = {"PATH": os.environ["PATH"], "BOOTSEER_EVENTS": str(tmp_path / "e.jsonl"), "BOOTSEER_JOB": "j"}
        env.update(environ or {})
        text = f"set {flags}\n. {SCRIPT}\n{script}\n"
        done = subprocess.run([*shell, "-c", text], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done

    run.file = tmp_path / "e.jsonl"
    run.lines = lambda: [json.loads(line) for line in run.file.read_bytes().splitlines()]
    return run


def test_begin_annotate_and_end(sh):
    done = sh(
        "bootseer_begin image ref=a n=12; id=$BOOTSEER_ID; sleep 0.2\n"
        'bootseer_annotate "$id" how=lazy; bootseer_end "$id" b=x',
        environ={"BOOTSEER_NODE": "n1", "BOOTSEER_RANK": "3", "BOOTSEER_GPUS": "8", "BOOTSEER_ATTEMPT": "007"},
    )
    assert (done.stdout, done.stderr) == ("", "")
    begin, note, end = sh.lines()
    assert re.fullmatch("[0-9a-f]{16}", begin["span"])
    assert begin["span"] == note["span"] == end["span"]
    assert begin["stage"] == "image"
    assert begin["attrs"] == {"ref": "a", "n": 12}
    for event in (begin, note, end):
        assert (event["node"], event["rank"], event["gpus"], event["attempt"], event["cycle"]) == ("n1", 3, 8, "007", 0)
    (span,) = events.read(sh.file).spans
    assert span.attrs == {"ref": "a", "n": 12, "how": "lazy", "b": "x"}
    assert 0.15e9 <= span.duration.ns <= 5e9
    assert not span.duration.uncertain
    assert span.begin.res == span.end.res == 10_000_000


@pytest.mark.parametrize(("world", "written"), [("3", {"world": 3}), ("3x", {}), ("", {}), (None, {})])
def test_a_first_step_says_how_many_ranks_there_are(sh, world, written):
    environ = {} if world is None else {"WORLD_SIZE": world}
    sh("bootseer_begin first_step; bootseer_span first_step -- true; bootseer_begin import", environ=environ)
    found = [event.get("attrs", {}) for event in sh.lines() if event["ev"] == "begin"]
    assert found == [written, written, {}]


def test_a_span_of_both_emitters_has_one_clock(sh, monkeypatch):
    sh("bootseer_begin env")
    (begin,) = sh.lines()
    monkeypatch.setenv("BOOTSEER_EVENTS", str(sh.file))
    emit.end(begin["span"])
    (span,) = events.read(sh.file).spans
    assert span.state is events.State.DONE
    assert not span.duration.uncertain
    assert span.duration.ns < 60e9


def test_span_runs_a_command_inside(sh):
    done = sh(
        'inner() { bootseer_span import -- false || echo "inner $?"; printf "<%s>" "$@"; return 3; }\n'
        'bootseer_span init a=1 -- inner "a b" "*" "" -- || echo "outer $?"; echo "${BOOTSEER_SPAN-unset}"',
    )
    assert done.stdout == "inner 1\n<a b><*><><-->outer 3\nunset\n"
    outer, inner, inner_end, outer_end = sh.lines()
    assert inner["parent"] == outer["span"] == outer_end["span"]
    assert inner_end["attrs"] == {"exit_code": 1}
    assert outer_end["attrs"] == {"exit_code": 3}


def test_a_child_process_sees_the_span(sh):
    sh("bootseer_span init -- sh -c '. \"$0\"; bootseer_begin import' " + str(SCRIPT))
    outer, inner, _ = sh.lines()
    assert inner["parent"] == outer["span"]


def test_the_command_reads_stdin_and_fails_under_errexit(sh):
    done = sh(
        "echo hello | bootseer_span env -- cat; bootseer_span env -- sh -c 'exit 7'; echo not reached", check=False
    )
    assert (done.returncode, done.stdout) == (7, "hello\n")
    assert [line["ev"] for line in sh.lines()] == ["begin", "end", "begin", "end"]


@pytest.mark.parametrize("flags", ["-eu", "-euf", "+e"])
def test_without_an_events_file_only_the_command_runs(sh, flags):
    done = sh(
        'bootseer_begin env; bootseer_end "$BOOTSEER_ID"; bootseer_annotate "" a=1; bootseer_span env -- echo hi',
        environ={"BOOTSEER_EVENTS": ""},
        flags=flags,
    )
    assert (done.stdout, done.stderr) == ("hi\n", "")


@pytest.mark.parametrize("path", ["/nonexistent/e.jsonl", "/dev/full", "/"])
def test_a_file_that_cannot_be_written_hurts_nothing(sh, path):
    script = f'bootseer_span env -- echo hi; BOOTSEER_EVENTS={sh.file}; bootseer_begin env; echo "$?"'
    done = sh(script, environ={"BOOTSEER_EVENTS": path})
    assert (done.stdout, done.stderr) == ("hi\n0\n", "")
    assert sh.lines()[0]["lost"] == 2


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_what_somebody_put_in_the_place_of_the_file_is_not_written_to(sh, tmp_path, kind):
    other = tmp_path / "precious"
    if kind == "pipe":
        os.mkfifo(sh.file)
    else:
        sh.file.symlink_to(other)
    if kind == "link":
        other.write_text("precious")
    done = sh('bootseer_begin env; rm "$BOOTSEER_EVENTS"; bootseer_begin env')
    assert (done.stdout, done.stderr) == ("", "")
    assert sh.lines()[0]["lost"] == 1
    assert (other.read_text() if kind == "link" else other.exists()) in ("precious", False)


def test_a_shell_that_sources_the_file_runs_nothing_of_it(sh, shell, tmp_path):
    run = f"touch {tmp_path}/run"
    texts = {"V": f"$({run})", "BOOTSEER_JOB": f"\\$({run})", "BOOTSEER_NODE": f"`{run}`"}
    sh('bootseer_begin env "v=$V"', environ=texts)
    subprocess.run([*shell, "-c", ". $0", sh.file], capture_output=True, check=False)
    assert not (tmp_path / "run").exists()
    (event,) = sh.lines()
    assert [event["attrs"]["v"], event["job"], event["node"]] == [*texts.values()]


def test_any_text_becomes_one_valid_line(sh):
    values = [
        'say "hi" \\ there',
        "tab\tnewline\nbell\a",
        "é ü 漢字",
        "$HOME `id` $(id)",
        "*",
        "-n",
        "%s %d",
        "",
        "x" * 5000,
        "a=b=c",
    ]
    for value in values:
        sh('bootseer_begin env "v=$V"', environ={"V": value, "BOOTSEER_JOB": value, "BOOTSEER_NODE": 'n"1\\'})
    read = sh.lines()
    assert [line["attrs"]["v"] for line in read[:3]] == [values[0], "tab newline bell ", values[2]]
    assert [line["attrs"]["v"] for line in read[3:8]] == values[3:8]
    assert len(read[8]["attrs"]["v"]) == 200
    assert read[9]["attrs"]["v"] == "a=b=c"
    assert {line["node"] for line in read} == {'n"1\\'}
    assert events.read(sh.file).foreign == 0


def test_numbers_stay_numbers_only_when_json_can_say_them(sh):
    sh("bootseer_begin env a=0 b=12 c=007 d=-1 e=1.5 f=99999999999999999999 g=1e5")
    assert sh.lines()[0]["attrs"] == {
        "a": 0, "b": 12, "c": "007", "d": "-1", "e": "1.5", "f": "99999999999999999999", "g": "1e5",
    }  # fmt: skip


def test_many_attributes_stay_below_4_kib(sh):
    sh(
        'set --; i=0; while [ $i -lt 50 ]; do set -- "$@" "a$i=$V"; i=$((i + 1)); done; bootseer_begin env "$@" bad',
        environ={"V": "漢" * 20},
    )
    (line,) = sh.file.read_bytes().splitlines(keepends=True)
    assert len(line) < 4096
    event = json.loads(line)
    assert len(event["attrs"]) + event["cut"] == 51


@pytest.mark.parametrize(
    "attr",
    ["url=https://u:hunter2@h/x", "url=https://h/?token=hunter2", "my_password=hunter2", "apiKey=hunter2",
     "v=Authorization: Bearer hunter2", "command=HF_TOKEN=hunter2 pip"],
)  # fmt: skip
def test_secrets_never_enter_attributes(sh, attr):
    sh('bootseer_begin env "$V"', environ={"V": attr})
    assert list(sh.lines()[0]["attrs"].values()) == ["[redacted]"]
    assert b"hunter2" not in sh.file.read_bytes()


def test_image_references_are_no_secrets(sh):
    sh("bootseer_begin env ref=docker://h:5000/name@sha256:ab")
    assert sh.lines()[0]["attrs"] == {"ref": "docker://h:5000/name@sha256:ab"}


def test_lines_of_processes_do_not_mix(shell, tmp_path):
    file = tmp_path / "e.jsonl"
    attrs = "a=$(printf %0200d $i) b=$(printf %0200d 1)"
    text = f". {SCRIPT}; i=0; while [ $i -lt 40 ]; do bootseer_begin env {attrs}; i=$((i+1)); done"
    env = {"PATH": os.environ["PATH"], "BOOTSEER_EVENTS": str(file), "BOOTSEER_JOB": "j" * 128}
    running = [subprocess.Popen([*shell, "-c", text], env=env) for _ in range(6)]
    assert [process.wait(200) for process in running] == [0] * 6  # a busy machine takes its time
    log = events.read(file)
    assert (log.events, log.foreign, log.torn) == (240, 0, 0)


def test_a_date_without_nanoseconds_still_gives_a_good_axis(sh, tmp_path):
    """busybox's date may not know them; the monotonic clock carries the durations."""
    fake = tmp_path / "bin" / "date"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\nexec /usr/bin/env -i /bin/date +%s\n" if Path("/bin/date").exists() else "#!/bin/sh\necho 1\n"
    )
    fake.chmod(0o755)
    sh("bootseer_span env -- sleep 0.3", environ={"PATH": f"{fake.parent}:{os.environ['PATH']}"})
    (span,) = events.read(sh.file).spans
    assert 0.25e9 <= span.duration.ns <= 5e9


def test_usage_is_said_when_there_is_no_command(sh):
    done = sh("bootseer_span env a=1 --", check=False)
    assert done.returncode == 64
    assert "usage" in done.stderr
