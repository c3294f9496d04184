"""The ends of programs that have a file of a striped store open: they end, and no half file stands.

On each Python that `scripts/setup` prepared; one that is not there is skipped.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.fsspecfs.filesystem import StripeFileSystem
from support import hadoop
from support.objectserver import BUCKET, ObjectServer

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "bootseer"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")

BEGIN = """
import atexit, asyncio, contextlib, gc, gzip, io, multiprocessing, os, signal, sys, tarfile, threading, time
import weakref, zipfile
import fsspec

def touch(file):
    size = file.read(5) if reads else file.write("half" if text else HALF)
    assert size

HALF = b"half" * (3 << 20)  # begins stripes, which whole files of less than 4 MiB do not

def opened(**options):
    file = fsspec.open(url, mode, **options).open()
    touch(file)
    return file

def binary():
    return fsspec.open(url, mode[0] + "b").open()

class Owner:
    def __init__(self, file):
        self.file, self.me = file, self

import json
from pathlib import Path
log = Path(sys.argv[1])
programs = json.loads(log.read_text())
if len(programs) > 1:  # imported once, while there is neither a thread nor a file
    fsspec.get_filesystem_class("bsx+file")
for number, (code, url, mode) in enumerate(programs):
    with open(f"{log}.{number}", "w") as said:
        if (pid := os.fork()) == 0:
            os.dup2(said.fileno(), 2)
            break
        os.waitpid(pid, 0)
else:
    os._exit(0)
del said
reads, text = "r" in mode, "b" not in mode
exec(code)
"""

WAYS = {
    "global": "f = opened()",
    "dropped": "f = opened(); del f; gc.collect(); time.sleep(0.2)",
    "function": "def main():\n    f = opened()\nmain()",
    "cycle": "a = Owner(opened()); del a",
    "collected cycle": "a = Owner(opened()); del a; gc.collect()",
    "attribute of a class": "class A:\n    f = opened()",
    "module": "sys.f = sys.modules['os'].f = opened()",
    "exception": "f = opened(); 1 / 0",
    "exception in with": "with fsspec.open(url, mode) as f:\n    touch(f)\n    1 / 0",
    "exit in with": "with fsspec.open(url, mode) as f:\n    touch(f)\n    sys.exit(3)",
    "exit": "f = opened(); sys.exit('enough')",
    "exit at once": "f = opened(); os._exit(3)",
    "terminated": "f = opened(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "interrupted": "f = opened(); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "exit by a signal": "f = opened()\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(1))\n"
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "generator": "def g():\n    with fsspec.open(url, mode) as f:\n        touch(f)\n        yield\n        touch(f)\n"
    "it = g(); next(it)",
    "dropped generator": "def g():\n    f = opened()\n    yield f\nit = g(); next(it); it.close(); del it",
    "thread": "def run():\n    f = opened()\n    1 / 0\nt = threading.Thread(target=run); t.start(); t.join()",
    "thread that goes on": "ready = threading.Event()\ndef run():\n    f = opened()\n    ready.set()\n"
    "    time.sleep(60)\nthreading.Thread(target=run, daemon=True).start(); ready.wait()",
    "forked child": "f = opened()\nif os.fork():\n    os.wait()\nelse:\n    sys.exit(0)",
    "child of multiprocessing": "f = opened()\n"
    "p = multiprocessing.get_context('fork').Process(target=print, args=(f,)); p.start(); p.join()",
    "cancelled task": "async def main():\n    f = opened()\n    await asyncio.sleep(60)\n"
    "async def cancel():\n    t = asyncio.create_task(main()); await asyncio.sleep(0.1); t.cancel(); await t\n"
    "asyncio.run(cancel())",
    "finaliser closes": "class A(Owner):\n    def __del__(self):\n        self.file.close()\n"
    "a = A(opened()); a.me = None",
    "dropped finaliser closes": "class A(Owner):\n    def __del__(self):\n        self.file.close()\n"
    "a = A(opened()); a.me = None; del a",
    "finaliser of another object closes": "a = Owner(None); a.me = None; weakref.finalize(a, opened().close); del a",
    "handler at the end closes": "f = opened(); atexit.register(f.close); 1 / 0",
    "text around": "f = io.TextIOWrapper(binary()); f.read(5) if reads else f.write('half')",
    "dropped text around": "f = io.TextIOWrapper(binary()); f.read(5) if reads else f.write('half'); del f",
    "buffer around": "f = (io.BufferedReader if reads else io.BufferedWriter)(binary())\n"
    "f.read(5) if reads else f.write(b'half'); del f",
    "text and buffer around": "f = io.TextIOWrapper((io.BufferedReader if reads else io.BufferedWriter)(binary()))\n"
    "f.read(5) if reads else f.write('half'); del f",
    "wrapper of the user's": "class W(io.RawIOBase):\n    def __init__(self, f):\n        self.f = f\n"
    "    def close(self):\n        self.f.close()\n        super().close()\nw = W(opened()); del w",
    "compression": "if not reads:\n    f = opened(compression='gzip'); f = None",
    "compression in a with": "if not reads:\n    with fsspec.open(url, mode, compression='gzip') as f:\n"
    "        touch(f)\n        1 / 0",
    "archive": "if not reads:\n    f = zipfile.ZipFile(binary(), 'w'); f.writestr('a', 'half'); f = None",
    "stack": "with contextlib.ExitStack() as stack:\n"
    "    f = stack.enter_context(fsspec.open(url, mode)); touch(f); 1 / 0",
}
OWNED = {
    "closed": "f = opened(); f.close()",
    "with": "with fsspec.open(url, mode) as f:\n    touch(f)",
    "closed by a handler at the end": "f = opened(); atexit.register(f.close)",
    "finaliser that its owner calls": "a = Owner(None); weakref.finalize(a, opened().close)()",
    "wrapper collected, then closed": "f = binary(); t = io.TextIOWrapper(f); t.write('half'); del t; f.close()",
    "opened and closed in a finaliser": "class A:\n    def __del__(self):\n        with fsspec.open(url, mode) as f:\n"
    "            touch(f)\na = A(); del a",
}
"""Of what an owner closes: it is published."""


def python(version: str) -> str:
    if version == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    found = ROOT / ".venv" / f"python{version}" / "bin" / "python"
    if not found.exists():
        pytest.skip(f"scripts/setup found no Python {version} on this machine")
    return str(found)


@pytest.fixture(params=VERSIONS)
def interpreter(request):
    return python(request.param)


def ends(interpreter: str, programs: list[tuple[str, Path | str, str]]) -> list[str]:
    """What each program said: its code, the file that it opens, and how. Each is a child of one interpreter, and has
    ended."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "said")
        log.write_text(json.dumps([(code, url(path), mode) for code, path, mode in programs]))
        done = subprocess.run([interpreter, "-c", BEGIN, log], capture_output=True, text=True, timeout=120, cwd="/")
        assert (done.returncode, done.stderr) == (0, "")
        said = [Path(f"{log}.{number}").read_text() for number in range(len(programs))]
    assert not [one for one in said if any(word in one for word in ("Fatal", "ImportError", "SyntaxError"))]
    return said


def url(path: Path | str) -> str:
    return f"bsx+{path}" if isinstance(path, str) else f"bsx+file://{path}"


def content(path: Path | str) -> bytes:
    import fsspec

    with fsspec.open(url(path)) as file:
        return file.read()


def whole(path: Path | str, size: int) -> bytes:
    import fsspec

    data = os.urandom(size)
    with fsspec.open(url(path), "wb") as out:
        out.write(data)
    return data


oldest_and_newest = pytest.mark.parametrize(
    "interpreter",
    [pytest.param(one, marks=[pytest.mark.soak] * (one in VERSIONS[1:-1])) for one in VERSIONS],
    indirect=True,
)


@oldest_and_newest
def test_programs_end_with_a_reader_open(interpreter, tmp_path):
    whole(tmp_path / "rb", 8 << 20)
    (tmp_path / "r").write_bytes(b"text" * 1000)
    modes = ("rb", "r") if interpreter == sys.executable else ("rb",)
    ends(interpreter, [(code, tmp_path / mode, mode) for code in WAYS.values() for mode in modes])


@oldest_and_newest
def test_no_half_file_stands_when_a_program_ends_with_a_writer_open(interpreter, tmp_path):
    data = whole(tmp_path / "before/x", 8 << 20)
    for mode in ("w", "wb") if interpreter == sys.executable else ("w",):
        paths = {way: tmp_path / f"{mode}-{number}" / "x" for number, way in enumerate(WAYS)}
        for path in paths.values():
            shutil.copytree(tmp_path / "before", path.parent)
        said = ends(interpreter, [(WAYS[way], path, mode) for way, path in paths.items()])
        for (way, path), told in zip(paths.items(), said, strict=True):
            assert content(path) == data, (way, told)
            if way in ("dropped", "function", "exit in with", "collected cycle"):
                assert len(list((path.parent / ".bsx").iterdir())) == 4, (way, told)


@oldest_and_newest
def test_what_its_owner_closes_is_published(interpreter, tmp_path):
    paths = {way: tmp_path / str(number) for number, way in enumerate(OWNED)}
    for path in paths.values():
        whole(path, 100)
    said = ends(interpreter, [(OWNED[way], path, "w") for way, path in paths.items()])
    assert {way: path.read_bytes() for way, path in paths.items()} == dict.fromkeys(paths, b"half"), said
    assert not any(said)


@pytest.fixture(params=[pytest.param("hdfs", marks=pytest.mark.hdfs), "s3"])
def elsewhere(request, monkeypatch) -> Iterator[str]:
    """A folder of another store."""
    import fsspec

    if request.param == "hdfs":
        yield f"{hadoop.shared().url}/{uuid.uuid4().hex}"
        return
    with ObjectServer() as server:
        monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
        monkeypatch.setenv("FSSPEC_S3", json.dumps(server.options))
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_programs_end_in_other_stores(elsewhere):
    StripeFileSystem.clear_instance_cache()
    path = f"{elsewhere}/x"
    for way, code in (WAYS | OWNED).items():
        data = whole(path, 8 << 20)
        if way in WAYS:
            ends(sys.executable, [(code, path, "rb")])
        said = ends(sys.executable, [(code, path, "w")])
        assert content(path) == (data if way in WAYS else b"half"), (way, said)


LATE = {
    "a handler from before us": "files = []\natexit.register(lambda: files[0].close())\n"
    "f = binary(); files.append(f); f.write(HALF)",
    "a thread when another has failed": "said = threading.Event()\ndef run():\n"
    "    with fsspec.open(url, 'wb') as f:\n        f.write(HALF); said.set(); time.sleep(0.5)\n"
    "threading.Thread(target=run).start(); said.wait(60); 1 / 0",
}


@oldest_and_newest
@pytest.mark.parametrize("way", LATE)
def test_what_is_closed_when_the_program_ends_is_published(interpreter, way, tmp_path):
    said = ends(interpreter, [(LATE[way], tmp_path / "x", "wb")])
    assert content(tmp_path / "x") == b"half" * (3 << 20), said


@oldest_and_newest
@pytest.mark.parametrize("how", ["threading.Thread(target=run).start()", "atexit.register(run)"])
def test_what_goes_on_after_the_main_thread_reads(interpreter, how, tmp_path):
    """When Python's pools of threads take no work any more."""
    whole(tmp_path / "x", 8 << 20)
    code = "fsspec.open(url).open()\ndef run():\n    time.sleep(0.3)\n    f = fsspec.open(url).open()\n"
    code += "    print(len(f.read()), len(f.fs.cat_file(f.path)), file=sys.stderr)\n"
    assert ends(interpreter, [(code + how, tmp_path / "x", "rb")]) == ["8388608 8388608\n"]


@pytest.mark.parametrize("where", ["folder", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def test_nothing_is_imported_after_a_store_was_made(where, tmp_path):
    """What a thread imports while another one forks the process is never there in the child."""
    place = tmp_path / "x" if where == "folder" else f"{hadoop.shared().url}/{uuid.uuid4().hex}"
    code = "fs, path = fsspec.url_to_fs(url)\nbefore = set(sys.modules)\n"
    code += (
        "for size in (1, 8 << 20):\n    fs.pipe_file(path, bytes(size))\n    opened().read()\n    fs.cat_file(path)\n"
    )
    code += "print(sorted(set(sys.modules) - before), file=sys.stderr)"
    assert ends(sys.executable, [(code, place, "rb")]) == ["[]\n"]


_FORBIDDEN = {"acquire", "wait", "join", "shutdown", "start", "sleep", "submit", "result", "Thread", "Timer"}
_HANDS_OVER = "finalisers.later"


def finalisers(tree: ast.Module) -> dict[str, bool]:
    """Names of what runs in finalisers; True: at the end of the program, where other threads still run."""
    found = {"__del__": False, "_dealloc_warn": False}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            if any(isinstance(name, ast.Name) and name.id == "__del__" for name in node.targets):
                found[node.value.id] = False
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("weakref.finalize", "finalize", "weakref.ref", "weakref.proxy") and len(node.args) > 1:
                found[ast.unparse(node.args[1]).rpartition(".")[2]] = False
            elif called == "atexit.register":
                found[ast.unparse(node.args[0]).rpartition(".")[2]] = True
        elif isinstance(node, ast.FunctionDef) and "atexit.register" in map(ast.unparse, node.decorator_list):
            found[node.name] = True
    return found


def waits(code: str) -> Iterator[str]:
    """What finalisers of a module start, lock or wait for; also by the functions of the module that they call."""
    tree = ast.parse(code)
    functions: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)

    def within(name: str, at_end: bool, seen: set[str]) -> Iterator[str]:
        if name in seen:
            return
        for function in functions.get(name, []):
            for node in ast.walk(function):
                if isinstance(node, ast.With) and not at_end:
                    for item in node.items:
                        if "lock" in ast.unparse(item.context_expr).lower():
                            yield f"{name}, line {node.lineno}: {ast.unparse(item.context_expr)}"
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    if called == _HANDS_OVER:
                        continue
                    last = called.rpartition(".")[2]
                    if last in ({"start", "Thread", "Timer", "submit"} if at_end else _FORBIDDEN):
                        yield f"{name}, line {node.lineno}: {called}"
                    mine = called in (last, f"self.{last}")
                    if mine and last in functions and (last != "close" or name == "__del__"):
                        yield from within(last, at_end, seen | {name})

    for name, at_end in finalisers(tree).items():
        yield from within(name, at_end, set())


def test_no_finaliser_waits_locks_or_starts_a_thread():
    found = {
        str(path.relative_to(SOURCE)): list(waits(path.read_text()))
        for path in sorted(SOURCE.rglob("*.py"))
        if "__del__" in (text := path.read_text()) or "_dealloc_warn" in text or "atexit" in text or "finalize" in text
    }
    assert len(found) >= 7
    assert not {path: calls for path, calls in found.items() if calls}


@pytest.mark.parametrize(
    "code",
    [
        "def __del__(self):\n    self.close()\ndef close(self):\n    with self._lock:\n        pass",
        "def __del__(self):\n    threading.Thread(target=x).start()",
        "def gone():\n    thread.join()\nweakref.finalize(self, gone)",
        "def release(self):\n    self._pool.shutdown()\n__del__ = release",
        "@atexit.register\ndef end():\n    tell()\ndef tell():\n    threading.Timer(1, f).start()",
        "def end():\n    pool.submit(f)\natexit.register(end)",
    ],
)
def test_the_search_finds_such_finalisers(code):
    assert list(waits(code))
    assert not list(waits(code.replace("__del__", "other").replace("atexit.register", "f").replace("finalize", "f")))
