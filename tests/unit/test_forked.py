"""Programs that are forked are as those that are started."""

import os
import signal
import subprocess
import sys

import pytest

from support import forked

_PROGRAM = """
import os, sys
print(sys.argv, sys.stdin.read(), os.getcwd(), dict(os.environ), os.listdir("/proc/self/fd"), os.umask(0))
print(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid(), os.sched_getscheduler(0), os.nice(0), sys.path[0])
print(os.getresuid(), os.getresgid(), os.getgroups(), os.access("/proc/self/fd", os.R_OK))
print([line for line in open("/proc/self/status") if line.startswith("Cap")])
print([open(f"/proc/self/{name}", "rb").read().rstrip(b"\\0") for name in ("cmdline", "environ")])
print("said", file=sys.stderr)
sys.stdout.flush()
"""


@pytest.mark.parametrize(
    "end", ["", "sys.exit(3)", "sys.exit('why')", "1 / 0", "os._exit(4)", "os.kill(os.getpid(), 9)"]
)
@pytest.mark.parametrize(
    "more",
    [
        {"cwd": "/"},
        {"process_group": 0},
        {"start_new_session": True, "umask": 0o7},
        pytest.param(
            {"user": 12, "group": 34, "extra_groups": [56], "cwd": "/"},
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
        ),
    ],
)
def test_what_a_program_is_given_and_how_it_ends(tmp_path, monkeypatch, end, more):
    monkeypatch.chdir(tmp_path)
    argv, passed = [sys.executable, "-c", _PROGRAM + end, "a\udcff", ""], os.memfd_create("x")
    more |= {"env": {"A": "b", "PYTHONCOERCECLOCALE": "0", "LC_CTYPE": "C.UTF-8"}, "pass_fds": [passed]}
    found = []
    for kind in (forked.Popen, subprocess.Popen):
        with kind(argv, stdin=-1, stdout=-1, stderr=-1, text=True, **more) as process:
            said, errors = process.communicate("in", 20)
        found.append((process.returncode, said, errors.splitlines()[-1:]))
    os.close(passed)
    assert found[0] == found[1]


def test_a_program_that_does_not_end():
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run("-c", "import time; time.sleep(60)", timeout=0.5)
    with forked.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        assert process._told >= 0
        assert process.poll() is None
        process.terminate()
        assert process.wait(10) == process.poll() == -signal.SIGTERM
