"""The command line as a whole: what it costs to start, that help is everywhere, and what a mistake looks like."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from bootseer.cli import main
from bootseer.cli.main import assemble
from bootseer.errors import DataError

CLI = [sys.executable, "-m", "bootseer.cli.main"]


def call(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *args], capture_output=True, text=True, timeout=30, check=False)


def test_importing_bootseer_pulls_in_nothing_heavy():
    code = "import bootseer, sys; print(len(sys.modules)); print([m for m in sys.modules if m.startswith('bootseer.')])"
    plain = "import sys; print(len(sys.modules))"
    base = subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, ours = done.stdout.splitlines()
    assert ours == "[]"
    assert int(count) - int(base.stdout) < 10


def test_importing_bootseer_takes_less_than_50_ms():
    def seconds(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - began

    cost = [seconds("import bootseer") - seconds("pass") for _ in range(7)]
    assert statistics.median(cost) < 0.05


@pytest.mark.parametrize(
    "verb",
    ["", "doctor", "run", "completion", "image", "image convert", "image run", "image mount", "image ls",
     "image cat", "image extract", "image profile", "image profile show", "image profile diff", "image profile explain",
     "env", "env run", "fs", "fs put", "fs mount", "profile", "profile show", "profile wrap"],
)  # fmt: skip
def test_every_verb_has_help(verb):
    done = call(*verb.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_a_command_keeps_its_own_options():
    """From the first word of the command on, nothing is an option of ours."""

    def commands(verb, name):
        for sub, inner in getattr(verb, "commands", {}).items():
            yield from commands(inner, f"{name} {sub}")
        if any(parameter.name == "command" and parameter.nargs == -1 for parameter in verb.params):
            yield name, verb

    found = dict(commands(typer.main.get_command(assemble()), ""))
    assert found.keys() == {" image run", " env run", " env explain", " profile wrap"}
    for name, verb in found.items():
        assert verb.context_settings["allow_interspersed_args"] is False, name


def test_env_run_leaves_the_options_of_the_command_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BOOTSEER_STATE_DIR", str(tmp_path / "state"))
    done = call("env", "run", "--no-snapshot", "--target", str(tmp_path / "env"), "echo", "--target", "/mine", "--json")
    assert (done.returncode, done.stdout) == (0, "--target /mine --json\n"), done.stderr


def test_a_verb_that_does_not_exist():
    done = call("imagine")
    assert done.returncode == 2
    assert "imagine" in done.stderr


def test_settings_that_are_not_understood(monkeypatch):
    monkeypatch.setenv("BOOTSEER_FETCH_STREAMS", "many")
    done = call("doctor")
    assert done.returncode == 78
    assert "fetch_streams" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_shell_completion_can_be_printed(shell):
    done = call("completion", shell)
    assert done.returncode == 0, done.stderr
    assert "_BOOTSEER_COMPLETE" in done.stdout


def test_bash_completes_a_verb(monkeypatch):
    """The printed script as a bash runs it; nothing in it depends on which shells are its parents."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = """
        eval "$(bootseer completion bash)"
        COMP_WORDS=(bootseer doc) COMP_CWORD=1
        _bootseer_completion bootseer
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["doctor"], done.stderr


def test_completion_for_a_shell_that_is_not_known():
    done = call("completion", "sh")
    assert done.returncode == 2
    assert "bash" in done.stderr


def test_what_others_wrote_does_not_move_the_cursor(capsys):
    """Names and platforms of images are in messages."""
    with pytest.raises(SystemExit) as ended:
        main._fail(DataError("image x is for \x1b[2J\r/a\nb", hint="convert caf\u00e9"))
    assert ended.value.code == 65
    assert capsys.readouterr().err == "bootseer: image x is for \\x1b[2J\\r/a\\nb; convert caf\u00e9\n"
