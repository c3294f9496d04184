"""``bootseer doctor``: what it finds, what it says when something is missing, and that it leaves nothing behind."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from bootseer.config import Config
from bootseer.doctor import Check, DoctorReport, Status, canary, checks, examine
from bootseer.doctor.examine import attempt
from bootseer.errors import DataError
from bootseer.image import record
from bootseer.kernel import mount
from bootseer.objects import open_store
from support import forked
from support.records import record_of
from support.waits import until

NAMES = [
    "kernel",
    "node daemon",
    "privileges",
    "fuse",
    "fuse takeover",
    "erofs",
    "loop device",
    "overlayfs",
    "fuse canary",
    "runtime",
    "hdfs client",
    "store",
    "registries",
    "cache",
    "lazy images",
]


def _doctor(place: Path, *before: str, options: tuple[str, ...] = ("--json",)) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "BOOTSEER_CACHE_DIR": str(place / "cache"), "BOOTSEER_STATE_DIR": str(place / "state")}
    if not before:
        return forked.cli("doctor", *options, env=environ)
    command = [*before, sys.executable, "-m", "bootseer.cli.main", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)


def _found(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    assert "Traceback" not in done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def _mounts() -> set[str]:
    return {entry.target for entry in mount.entries() if "doctor" in entry.target}


@pytest.mark.root
@pytest.mark.runtime
def test_where_everything_works(place: Path) -> None:
    before = _mounts()
    done = _doctor(place)
    assert done.returncode == 0, done
    answer = json.loads(done.stdout)
    found = _found(done)
    assert list(found) == NAMES
    for name in ("kernel", "privileges", "fuse", "erofs", "overlayfs", "fuse canary", "runtime", "lazy images"):
        assert found[name]["status"] == "ok", found[name]
    assert (answer["ok"], answer["exit_code"]) == (True, 0)
    assert "an error, not zeros" in str(found["fuse canary"]["detail"])
    assert answer["settings"]["cache_dir"] == str(place / "cache")
    assert os.listdir(place) == []
    assert _mounts() == before


@pytest.mark.root
def test_text(place: Path) -> None:
    done = _doctor(place, options=())
    assert done.returncode == 0
    assert "\nThe fast way works here" in done.stdout
    assert "images and environments are served" in done.stdout
    assert f'cache_dir = "{place}/cache"' in done.stdout
    assert all(name in done.stdout for name in NAMES)
    (canary,) = (line for line in done.stdout.splitlines() if "fuse canary" in line)  # whole, for grep
    assert canary.rstrip().endswith("an error, not zeros, after a kill")


@pytest.mark.root
def test_without_privileges(place: Path) -> None:
    done = _doctor(place, "setpriv", "--bounding-set=-all", "--inh-caps=-all")
    assert done.returncode == 77, done
    found = _found(done)
    assert found["privileges"]["status"] == "missing"
    assert "run as root" in str(found["privileges"]["fix"])
    assert found["fuse canary"]["status"] == "missing"
    for name, check in found.items():
        if check["status"] == "missing":
            assert check["cost"], name
            assert check["fix"], name
    assert os.listdir(place) == []
    text = _doctor(place, "setpriv", "--bounding-set=-all", "--inh-caps=-all", options=())
    assert "The fast way does not work here: privileges" in text.stdout


@pytest.mark.root
def test_as_another_user_in_a_user_namespace(place: Path) -> None:
    """All capabilities, but only over a namespace: the mounts are refused, and that is what it says."""
    done = _doctor(place, "unshare", "--user", "--map-root-user")
    assert done.returncode == 77, done
    found = _found(done)
    assert found["erofs"]["status"] == "missing"
    assert found["erofs"]["privilege"] is True
    assert os.listdir(place) == []


@pytest.mark.file_mounts
@pytest.mark.root
def test_without_fuse(place: Path) -> None:
    hidden = 'mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && exec "$@"'
    done = _doctor(place, "unshare", "--mount", "sh", "-c", hidden, "sh")
    assert done.returncode == 71, done
    found = _found(done)
    assert found["lazy images"]["status"] == found["fuse takeover"]["status"] == "missing"
    assert found["fuse"]["status"] == "missing"
    assert "modprobe fuse" in str(found["fuse"]["fix"])
    assert "bootseer image extract" in str(found["lazy images"]["cost"])  # root's image run needs FUSE
    assert found["fuse canary"]["status"] == "missing"
    assert "/dev/fuse" in str(found["fuse canary"]["detail"])
    assert found["erofs"]["status"] == "ok"
    assert os.listdir(place) == []


@pytest.mark.root
def test_without_tools(place: Path) -> None:
    """Nothing in PATH: the fast way still works."""
    environ = {**os.environ, "BOOTSEER_CACHE_DIR": str(place / "cache"), "PATH": "/nonexistent"}
    done = forked.cli("doctor", "--json", env=environ)
    assert done.returncode == 0, done
    found = _found(done)
    assert found["fuse canary"]["status"] == "ok"
    done = forked.cli("doctor", env=environ)
    assert done.stdout.endswith("\nThe fast way works here, but for containers: no runtime\n")


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["mine/shut", "mine/good"], "ok"),
        (["mine/gone", "mine/good"], "ok"),
        (["mine/shut", "other/good"], "limited"),
        (["mine/gone", "mine/shut"], "missing"),
        (["docker-archive:/x.tar", "!!", "mine/good"], "ok"),
        (["other/redirect", "mine/good"], "ok"),
        (["other/realm", "mine/good"], "limited"),
        (["other/basic", "mine/good"], "limited"),
        (["other/realm"], "limited"),
        (["nobody/x", "mine/good"], "limited"),
        ([], "ok"),
    ],
)
def test_registries_of_which_one_image_is_bad(
    names: list[str], status: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who may write to the store chooses what records name: no login goes where it is not kept for."""
    seen: dict[str, list[str]] = {"mine": [], "other": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            who = next(name for name, port in ports.items() if port == self.server.server_port)
            seen[who] += [self.headers["Authorization"]] if self.headers["Authorization"] else []
            mine = f"http://127.0.0.1:{ports['mine']}"
            status, kind, value = {
                "good": (200, "Docker-Content-Digest", "sha256:" + "a" * 64),
                "gone": (404, "X", ""),
                "shut": (403, "X", ""),
                "redirect": (307, "Location", f"{mine}/v2/good/manifests/latest"),
                "realm": (401, "WWW-Authenticate", f'Bearer realm="{mine}/v2/token",service="x"'),
                "basic": (401, "WWW-Authenticate", 'Basic realm="x"'),
                "token": (401, "X", ""),
            }[self.path.split("/")[2].partition("?")[0]]
            self.send_response(status)
            self.send_header(kind, value)
            self.send_header("Content-Length", "2")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with contextlib.ExitStack() as stack:
        ports = {"nobody": 1}
        for who in seen:
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            ports[who] = server.server_port
        store = open_store(place / "store")
        for number, name in enumerate(names):
            who, _, rest = name.partition("/")
            reference = f"127.0.0.1:{ports[who]}/{rest}:1" if who in ports else name
            record.save(store, msgspec.structs.replace(record_of(f"{number}", "0" * 64), reference=reference))
        login = {"auth": base64.b64encode(b"me:secret").decode()}
        logins = place / "logins.json"
        logins.write_text(json.dumps({"auths": {f"127.0.0.1:{ports['mine']}": login}}))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(logins))
        found = attempt("registries", lambda: checks.registries(Config(store=store.url)), "cost", "", essential=False)
    assert found.status == status, found
    assert seen["other"] == []


def test_store_in_an_hdfs_that_does_not_answer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bootseer.errors import UnavailableError
    from bootseer.hdfs.namenode import NameNode

    def refuse(url: str) -> None:
        raise UnavailableError("cannot reach the NameNode of hdfs://nowhere:1", hint="check that it runs")

    monkeypatch.setattr(NameNode, "connect", refuse)
    report = examine(Config(store="hdfs://nowhere:1/store", cache_dir=str(place / "cache")))
    check = next(check for check in report.checks if check.name == "hdfs client")
    assert (check.status, check.essential) == ("missing", True)
    assert "cannot reach the NameNode" in check.detail
    assert check.fix == "check that it runs"


@pytest.mark.root
def test_cache_that_cannot_be_written_to(place: Path) -> None:
    """A read-only file system under it."""
    (place / "ro").mkdir()
    subprocess.run(["mount", "--bind", "-o", "ro", place / "ro", place / "ro"], check=True)
    report = examine(Config(cache_dir=str(place / "ro" / "cache"), state_dir=str(place)))
    mount.unmount(place / "ro")
    check = next(check for check in report.checks if check.name == "cache")
    assert check.status == "missing"
    assert report.exit_code == 71
    assert not list(Path("/tmp").glob("bootseer-doctor-*"))


@pytest.mark.root
@pytest.mark.parametrize("name", ["cache", "state"])
def test_a_folder_that_others_can_replace(place: Path, name: str) -> None:
    """A start refuses it, so it does not work, whether it is there already or not."""
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    places = {"cache": place / "c", "state": place / "s"} | {name: place / "open/own"}
    config = Config(cache_dir=str(places["cache"]), state_dir=str(places["state"]))
    seen: list[Path] = []
    for _ in range(2):
        report = examine(config, progress=lambda _: seen.extend(place.glob("open/*doctor*")))
        assert not seen, "it works where others could lead it elsewhere"
        check = next(check for check in report.checks if check.name == "cache")
        assert (check.status, "others can replace" in check.detail, report.exit_code) == ("missing", True, 71), check
        assert not [one for one in place.rglob("*doctor*")]
        places[name].mkdir(exist_ok=True)


@pytest.mark.root
def test_a_link_in_a_shared_folder_on_the_way_to_the_cache_is_followed_as_by_starts(place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    (place / "own").mkdir()
    (place / "open/link").symlink_to(place / "own")
    report = examine(Config(cache_dir=str(place / "open/link/c"), state_dir=str(place / "s")))
    check = next(check for check in report.checks if check.name == "cache")
    assert check.status == "ok", check


@pytest.mark.root
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ended_in_the_middle(place: Path, stop: signal.Signals) -> None:
    """No mount and no server stays; after all but SIGKILL no file either."""
    before = _mounts()
    environ = {**os.environ, "BOOTSEER_CACHE_DIR": str(place / "cache")}
    command = [sys.executable, "-m", "bootseer.cli.main", "doctor", "--json"]
    with forked.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ) as process:
        until(lambda: list(place.glob(".bootseer-doctor-*/canary/served")), 30, step=0.002)
        process.send_signal(stop)
        code = process.wait(40)
        assert process.stderr
        assert b"Traceback" not in process.stderr.read()
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[stop]
    assert _mounts() == before
    until(lambda: not _servers(place), 15)
    if stop != signal.SIGKILL:
        assert os.listdir(place) == []


def _servers(place: Path) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if b"doctor.canary" in line and os.fsencode(place) in line:
            found.append(line)
    return found


@pytest.mark.root
def test_canary_sees_a_server_that_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: were reads to succeed after the kill, it would say so."""
    image = _image(place)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    real = subprocess.Popen.wait

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert process.stdin
        return 0 if not process.stdin.closed else real(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(DataError, match="succeeded though"):
        canary.whole(place, *image)


@pytest.mark.root
def test_canary_sees_wrong_bytes(place: Path) -> None:
    """Control: a data file of zeros."""
    meta, data = _image(place)
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(DataError, match="not what was put in"):
        canary.whole(place, meta, data)


def test_canary_sees_zeros(place: Path) -> None:
    """Control: zeros where an error should be."""
    (place / "after").write_bytes(bytes(canary.FILE_SIZE))
    with pytest.raises(DataError, match="zeros after"):
        canary.expect_errors(place / "after", canary.contents("after"))


def _image(place: Path) -> tuple[Path, Path]:
    folder = place / "image"
    folder.mkdir()
    return canary.make(folder)


def _report(*found: Check) -> DoctorReport:
    return DoctorReport(version="0", checks=found, settings={})


@pytest.mark.parametrize(("verdict", "status"), [("ok", "ok"), ("missing", "missing")])
def test_lazy_images_need_the_canary(place: Path, verdict: Status, status: str) -> None:
    found = Check(name="fuse canary", status=verdict, detail="because", privilege=verdict != "ok")
    config = Config(cache_dir=str(place))
    no_daemon = Check(name="node daemon", status="missing", detail="")
    check = attempt("lazy images", lambda: checks.lazy_images(config, found, no_daemon), "much", "", essential=True)
    assert (check.status, check.essential, check.privilege) == (status, True, status != "ok")
    assert bool(check.cost and check.fix) == (status != "ok")
    assert ("because" in check.detail) == (status != "ok")


def test_exit_codes() -> None:
    fine = Check(name="a", status="ok", detail="", essential=True)
    limited = Check(name="b", status="limited", detail="", essential=True)
    optional = Check(name="c", status="missing", detail="")
    denied = Check(name="d", status="missing", detail="", essential=True, privilege=True)
    absent = Check(name="e", status="missing", detail="", essential=True)
    assert _report(fine, limited, optional).exit_code == 0
    assert _report(fine, denied).exit_code == 77
    assert _report(denied, absent).exit_code == 71
    assert _report(denied, absent).lacking == (denied, absent)


def test_a_surprise_in_a_check_is_a_finding() -> None:
    def broken() -> str:
        raise ZeroDivisionError("oops")

    check = attempt("x", broken, "", "", essential=True)
    assert (check.status, check.detail) == ("missing", "ZeroDivisionError: oops")
