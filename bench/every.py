"""``scripts/bench all``: every report of ``bench/results`` anew, of one commit, in one night or in parts.

    scripts/bench all [--folder DIR] [--list] [NAME ...]

Each report is made by its command in `COMMANDS`, one after another, into the folder (default: one for the commit, in
the development cache). A report that is there already is not made again, so that a run which was interrupted goes on.
One that fails is named at the end, and those after it are made all the same. ``NAME``: only these reports.

Standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COMMANDS = {
    "image": "bench image --variants local*,hot,on-demand,warm*,nydus,nydus-prefetch,containerd,read*",
    "image-first": "bench image --quick --variants hot,hot-10ms,on-demand,on-demand-10ms,nydus,nydus-10ms --runs 5",
    "image-written": "bench image --quick --variants unpack,extract,containerd,convert,convert-tools --runs 5 "
    "--conversions 5",
    "image-rebuilt": "bench image --quick --variants hot,rebuilt,rebuilt-warm,rebased,on-demand --runs 5",
    "image-hdfs": "bench image --quick --variants hot,hdfs,hdfs-frozen,hdfs-slow --conversions 0 --runs 5",
    "demo": "demo --full",
    "cluster": "bench cluster --rate 100 --scenario cold",
    "cluster-known": "bench cluster --rate 50 --scenario bench/cluster/known/cold.toml --scenario alone "
    "--scenario bench/cluster/known/hot.toml --scenario registry --scenario mirror "
    "--scenario bench/cluster/known/slow-node.toml",
    "cluster-size": "bench cluster --nodes 16 --rate 50 --scenario size",
    "checkpoint": "bench checkpoint --parts local,save,frozen,resume,once,sharing,free",
    "checkpoint-quick": "bench checkpoint --quick --parts resume --runs 5",
    "checkpoint-tensors": "bench checkpoint --quick --parts small,tensors --runs 5",
    "checkpoint-names": "bench checkpoint --parts names,random",
    "checkpoint-many": "bench checkpoint --quick --parts many --runs 5",
    "env": "bench env --parts first,linked,hits,changed",
    "env-renewed": "bench env --parts renewed --runs 4",
    "packages": "bench packages",
    "caches": "bench caches",
    "kubernetes": "bench kubernetes",
    "stripefs": "bench stripefs --parts writes,scan,reads,free",
    "stripefs-writes": "bench stripefs --parts faulty-writes",
    "stripefs-secured": "bench stripefs --parts secured,secured-frozen",
    "stripefs-placement": "bench stripefs --quick --parts placement --runs 5",
    "ablate": "bench ablate --parts hotpack,readahead",
    "ablate-reach": "bench ablate --quick --parts reach,reach-10ms --runs 5",
    "ablate-elsewhere": "bench ablate --quick --parts elsewhere --runs 3",
    "ablate-hung-range": "bench ablate --quick --parts hung-range,silent-range --runs 3",
    "start-quick": "bench start --quick",
    "turn": "bench turn",
    "scheduler": "bench scheduler",
    "daemons": "bench daemons",
    "account": "bench account",
    "emit": "bench emit",
    "fleet": "bench fleet",
}
"""The command of ``scripts/`` that makes each report."""
JOINED = {
    "cluster-slow-node": "cluster-known",
    "checkpoint-sharing": "checkpoint",
    "checkpoint-frozen": "checkpoint",
}
"""Reports on record that had commands of their own. What they measured the other one measures now: when that is made
anew, they go from ``bench/results`` and from ``bench/page/reports.py``."""


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def main(argv: list[str]) -> int:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/bench all", description=__doc__, formatter_class=text)
    parser.add_argument("--folder", type=Path, help="where the reports go")
    parser.add_argument("--list", action="store_true", help="say which are there and how the others are made")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    options = parser.parse_args(argv)
    if odd := [name for name in options.names if name not in COMMANDS]:
        parser.error(f"there is no report {', '.join(odd)}; there are: {', '.join(COMMANDS)}")
    if _git("status", "--porcelain", "--untracked-files=no") and not options.list:
        print(
            "error: files were changed, and all reports are of one commit (commit first)",
            file=sys.stderr,
        )
        return 78
    cache = Path(os.environ.get("BOOTSEER_DEV_CACHE") or Path.home() / ".cache/bootseer-dev")
    folder: Path = (options.folder or cache / "reports" / _git("rev-parse", "--short=12", "HEAD")).absolute()
    wanted = [name for name in COMMANDS if not options.names or name in options.names]
    if options.list:
        for name in wanted:
            print(f"{name:20} {'is there' if (folder / f'{name}.json').exists() else f'scripts/{COMMANDS[name]}'}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in wanted if not made(name, folder)]
    there = sum((folder / f"{name}.json").exists() for name in COMMANDS)
    print(f"{there} of {len(COMMANDS)} reports are in {folder}", file=sys.stderr)
    if failed:
        print(f"error: not made: {', '.join(failed)} (the same command tries them again)", file=sys.stderr)
    return 1 if failed else 0


def made(name: str, folder: Path) -> bool:
    """Make the report, unless it is there."""
    path, part = folder / f"{name}.json", folder / f"{name}.part"
    if path.exists():
        return True
    program, *words = COMMANDS[name].split()
    began = time.monotonic()
    print(f"==> {name}: scripts/{COMMANDS[name]}", file=sys.stderr)
    out = "--output" if program == "demo" else "--out"
    code = subprocess.run([ROOT / "scripts" / program, *words, out, part], cwd=ROOT, check=False).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code == 0 and part.exists():
        part.rename(path)
    print(f"==> {name}: exit code {code} after {time.monotonic() - began:.0f} s", file=sys.stderr)
    return path.exists()
