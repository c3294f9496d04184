"""Workers of a real Ray in an environment: the example of docs/howto/ray.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bootseer.demo.programs import WITH_US

pytestmark = pytest.mark.serial
pytest.importorskip("ray")

EXAMPLE = Path(__file__).parents[2] / "examples/ray/with-env"
DRIVER = """
import json, sys
import ray

@ray.remote
def answer():
    import time
    import fortytwo
    time.sleep(0.5)  # else one worker does all
    return fortytwo.ANSWER

ray.init(num_cpus=2, include_dashboard=False, runtime_env={"py_executable": sys.argv[1]}, _temp_dir=sys.argv[2])
print(json.dumps(ray.get([answer.remote() for _ in range(4)])))
"""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The URL of a wheel, and who has asked for it."""
    wheel, asked = tmp_path / "fortytwo-1-py3-none-any.whl", list[str]()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("fortytwo.py", "ANSWER = 42\n")
        file.writestr("fortytwo-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: fortytwo\nVersion: 1\n")
        file.writestr("fortytwo-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("fortytwo-1.dist-info/RECORD", "")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(wheel.read_bytes())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{wheel.name}", asked
        server.shutdown()


def test_one_node_installs_and_another_restores(place: Path, index: tuple[str, list[str]]) -> None:
    url, asked = index
    shutil.copy(EXAMPLE, place)
    (place / "requirements.txt").write_text(f"fortytwo @ {url}\n")
    executable = f"{place}/with-env {place}/env {sys.executable}"
    for node in ("one", "two"):
        environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BOOTSEER_STORE": str(place / "store"),
            "BOOTSEER_CACHE_DIR": str(place / node / "cache"),
            "BOOTSEER_STATE_DIR": str(place / node / "state"),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        argv = [*WITH_US, sys.executable, "-c", DRIVER, executable, f"/tmp/ray-{os.getpid()}"]
        if node == "two":  # as a worker is started
            argv = [*executable.split(), "-c", "import fortytwo; print([fortytwo.ANSWER] * 4)"]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=180, check=False)
        try:
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout.splitlines()[-1]) == [42] * 4
        finally:
            bootseer = [sys.executable, "-m", "bootseer.cli.main", "unmount", "--environments"]
            subprocess.run(bootseer, env=environ, check=True, timeout=60)
            shutil.rmtree(place / "env", ignore_errors=True)
            shutil.rmtree(f"/tmp/ray-{os.getpid()}", ignore_errors=True)
    assert len(asked) == 1
