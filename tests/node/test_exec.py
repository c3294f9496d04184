"""`bootseer exec`: an ordinary user's command in a tree that root has made."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.images import programs

pytestmark = pytest.mark.root

USER, OTHER = 65534, 65533


def argv(*words: str | Path, user: int = USER, home: str | Path = "/nonexistent") -> list[str]:
    """The command line, as run by an ordinary user."""
    who = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--", "env", f"HOME={home}"]
    return [*who, sys.executable, "-m", "bootseer.cli.main", "exec", *map(str, words)]


def call(*words: str | Path, cwd: str | Path = "/", **who: object) -> subprocess.CompletedProcess[str]:
    command = argv(*words, **who)  # type: ignore[arg-type]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def root(place: Path) -> Path:
    """A tree with a shell, whose ``id`` is a set-uid program of root."""
    place.chmod(0o755)
    root = place / "root"
    for folder in ("bin", "etc", "usr/lib"):
        (root / folder).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for name in ("sh", "cat", "touch", "pwd", "sleep"):
        (root / "bin" / name).symlink_to("busybox")
    for member in programs("id"):
        path = root / member.name
        if member.kind == "dir":
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.write_bytes(member.data)
            path.chmod(0o755)
    (root / "bin/id").chmod(0o4755)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/release").write_text("of the image\n")
    return root


def test_a_command_sees_the_tree_and_what_is_shown_to_it(place: Path, root: Path) -> None:
    work, data = place / "home/work", place / "data"
    for folder in (work, data):
        folder.mkdir(parents=True)
        os.chown(folder, USER, USER)
    script = """
        cat /etc/release; pwd; echo mine > file; cat /data/given; ! touch /data/new && ! touch /bin/new && touch /rw/new
        test -e /dev/null && test -e /proc/self/fd && test ! -e /home || exit 1; id; cat /etc/passwd; exit 7"""
    (data / "given").write_text("given\n")
    volumes = ("-v", f"{data}:/data:ro", "-v", f"{data}:/rw")
    done = call("--image", root, *volumes, "sh", "-c", script, cwd=work, home=place / "home")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines()[:3] == ["of the image", str(work), "given"]
    assert f"uid={USER}" in done.stdout
    assert "euid=" not in done.stdout  # but without exec:
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]
    assert "euid=0" in subprocess.run([*user, root / "bin/id"], capture_output=True, text=True, check=True).stdout
    assert f":x:{USER}:{USER}:" in done.stdout
    assert (work / "file").read_text() == "mine\n"
    assert {path.name for path in data.iterdir()} == {"given", "new"}
    assert not (root / "data").exists()


def test_a_pipe_in_place_of_its_users_is_not_waited_for(root: Path) -> None:
    (root / "etc/passwd").unlink()
    os.mkfifo(root / "etc/passwd", 0o644)
    (root / "etc/group").symlink_to("passwd")
    done = call("--image", root, "id")
    assert (done.returncode, f"uid={USER}" in done.stdout) == (0, True), done.stderr


def test_of_the_images_users_so_much_is_read_and_never_this_hosts(place: Path, root: Path) -> None:
    for name in ("passwd", "group"):
        with open(root / "etc" / name, "w") as file:
            file.truncate(1 << 41)
    limited = ["prlimit", f"--as={2 << 30}", "--", *argv("--image", root, "id")]
    done = subprocess.run(limited, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, f"uid={USER}" in done.stdout) == (0, True), done.stderr
    (place / "outside").write_text("of:x:4711:4711:the host::\n")
    for name in ("passwd", "group"):
        (root / "etc" / name).unlink()
        (root / "etc" / name).symlink_to(place / "outside")
    done = call("--image", root, "cat", "/etc/passwd")
    assert "the host" not in done.stdout


def test_signals_reach_the_command(root: Path) -> None:
    for script, code in (("trap 'exit 9' TERM;", 9), ("", -signal.SIGTERM)):
        command = argv("--image", root, "sh", "-c", f"{script} echo $$; while :; do sleep 0.1; done")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid  # there is no process between
            process.terminate()
            assert process.wait(60) == code


def test_mistakes_are_one_line(place: Path, root: Path) -> None:
    private = place / "private"
    (private / "root").mkdir(parents=True)
    private.chmod(0o700)
    os.chown(private, OTHER, OTHER)
    for words, code, said in (
        (("--image", private, "sh"), 77, "another user's"),
        (("--image", place / "none", "sh"), 66, "No such file"),
        (("--image", "/", "sh"), 78, "is the root already"),
        (("--image", root, "-v", f"{place}/none:/x", "sh"), 66, "no file or folder"),
        (("--image", root, "-v", "/tmp:/", "sh"), 78, "below /"),
        (("--image", root, "-v", ":/data", "sh"), 78, "bad volume ':/data'"),
        (("--image", root, "-v", f"{root}:/tmp/{place.name}", "sh"), 78, f"/tmp/{place.name} is not there to show"),
        (("--image", root, "-v", f"{private}/root:/x", "sh"), 77, f"{private}/root is another user's"),
        (("--image", root, "-w", "/none", "sh"), 66, "no folder /none"),
        (("--image", root, "nonesuch"), 127, "cannot run nonesuch"),
        (("--image", root, "/etc/release"), 126, "cannot run /etc/release"),
        (("sh",), 78, "this is no job of Slurm"),
    ):
        done = call(*words)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done.stderr
        assert said in done.stderr
