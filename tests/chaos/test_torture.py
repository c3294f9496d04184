"""The torture image, mounted: every byte and attribute is that of the unpacked image, whichever way it is read."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks import tree
from bootseer.kernel import mount as mounts
from bootseer.objects import open_store
from support import torture, ways
from support.crowd import Crowd, Tally, files_of
from support.node import Node
from support.torture import Site
from support.trees import Found, scan
from support.waits import until

pytestmark = pytest.mark.root

NodeOf = Callable[..., Node]
MOST = 64 << 20
"""Of larger files, data and samples are compared (`ways.regions`)."""


@pytest.fixture(scope="session")
def want(site: Site) -> Found:
    return scan(site.reference, largest=MOST)


def differences(found: Found, want: Found) -> list[object]:
    """The first of them: pytest would need minutes to tell those of large trees."""
    paths = [path for path in found.keys() | want.keys() if found.get(path) != want.get(path)]
    return [(path, found.get(path), want.get(path)) for path in paths[:5]]


def compare(
    site: Site,
    target: Path,
    place: Path,
    *,
    readers: int = 1,
    some: Sequence[str] = tuple(ways.WAYS),
    drop: float = 0.0,
    prefix: Sequence[str] = (),
    files: Sequence[str] | None = None,
) -> Tally:
    """What a crowd finds that reads all files once, or ``files``."""
    folder = place / f"crowd{len(list(place.glob('crowd*')))}"
    names = files_of(site.reference) if files is None else files
    with Crowd(
        target, site.reference, folder, files=names, readers=readers, some=some, drop=drop, passes=1, prefix=prefix
    ) as crowd:
        found = crowd.join(100)
        assert (found.mismatches, found.zeros, found.errors, found.hangs) == (0, 0, 0, 0), crowd.findings
    assert found.files == readers * len(names)
    return found


def test_the_image_has_what_it_should(site: Site, want: Found) -> None:
    """The control of this module: what it compares is there."""
    assert len(want) > 20_150
    assert want[b"sparse/huge"]["size"] == torture.SPARSE
    assert os.stat(site.reference / "sparse/huge").st_blocks * 512 < 1 << 20
    assert want[b"links/one"]["links"] == [b"links/one", b"links/three", b"links/two"]
    assert {name.split(b"/")[0] for name in want} >= {b"large", b"deep", b"names", b"special", b"sizes"}
    assert max(map(len, want)) > 500
    assert want[b"attributes/capability"]["xattrs"].keys() == {b"security.capability"}  # type: ignore[attr-defined]
    assert b"system.posix_acl_access" in want[b"attributes/acl"]["xattrs"]  # type: ignore[operator]
    assert int(str(want[b"special/setuid"]["mode"]), 8) & stat.S_ISUID
    assert b"changed/gone" not in want
    assert b"opaque/below" not in want


def test_cold_with_one_reader_then_warm(site: Site, node_of: NodeOf, place: Path, want: Found) -> None:
    node = node_of(site)
    made = node.mount()
    assert made.status().driver == "fuse"
    compare(site, made.target, place)
    assert made.status().slow_faults > 0
    assert differences(scan(made.target, largest=MOST), want) == []
    compare(site, made.target, place, drop=1.0)  # the blocks are here, the pages are not
    made.unmount()
    again = node.mount(background_fill=True, fill_quiet=0.05)
    again.ready()
    until(lambda: again.status().complete, 30, "a complete tree")
    compare(site, again.target, place, readers=2)


@pytest.mark.parametrize("way", ways.WAYS)
def test_cold_each_way(site: Site, node_of: NodeOf, place: Path, way: str) -> None:
    made = node_of(site).mount()
    names = [name for name in files_of(site.reference) if not name.startswith("large")]
    compare(site, made.target, place, some=[way], readers=2, files=names)


def test_cold_with_16_readers(site: Site, node_of: NodeOf, place: Path) -> None:
    made = node_of(site).mount()
    compare(site, made.target, place, readers=16, drop=0.3)


def test_a_program_is_executed(site: Site, node_of: NodeOf) -> None:
    target = node_of(site).mount().target
    want = hashlib.sha256((site.reference / "bulk/003").read_bytes()).hexdigest()
    for _ in range(2):
        done = subprocess.run(
            [target / torture.PROGRAM, target / "bulk/003"], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.split()[0] == want
    assert subprocess.run([target / torture.SCRIPT], capture_output=True, timeout=60, check=True).stdout == b"42\n"
    done = subprocess.run(  # with its own libraries
        ["chroot", target, f"/{torture.PROGRAM}", "/bulk/003"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[0] == want


def test_through_an_overlay(site: Site, node_of: NodeOf, place: Path, want: Found) -> None:
    made = node_of(site).mount()
    for name in ("upper", "work", "merged"):
        (place / name).mkdir()
    target = place / "merged"
    mounts.mount_overlay([made.target], target, upper=place / "upper", work=place / "work")
    try:
        # Copied up by a change of their attributes, by a write, and by a rename, while nothing is here yet.
        os.chmod(target / "bulk/003", 0o600)
        with open(target / "bulk/004", "ab") as file:
            file.write(b"more")
        os.rename(target / "bulk/005", target / "bulk/moved")
        os.utime(target / "sparse/islands", ns=(0, 0))
        os.link(target / "links/one", target / "links/four")
        os.setxattr(target / "attributes/capability", "user.more", b"1")
        upper = place / "upper"
        for name, old in (("bulk/003", "bulk/003"), ("bulk/moved", "bulk/005"), ("sparse/islands", "sparse/islands"),
                          ("links/one", "links/one")):  # fmt: skip
            assert (upper / name).read_bytes() == (site.reference / old).read_bytes(), name
        assert (upper / "bulk/004").read_bytes() == (site.reference / "bulk/004").read_bytes() + b"more"
        assert os.getxattr(upper / "attributes/capability", "security.capability")
        changed = {"bulk/004", "bulk/005"}
        names = [name for name in files_of(site.reference) if name not in changed]
        compare(site, target, place, readers=2, files=names)
        found = scan(made.target, largest=MOST)  # the lower folder is as it was
    finally:
        mounts.unmount(target)
    assert differences(found, want) == []


_OVERLAY = """
set -e
mount -t overlay -o userxattr,lowerdir="$1",upperdir="$2/upper",workdir="$2/work" overlay "$2/merged"
cmp "$2/merged/bulk/003" "$3/bulk/003"
echo more >> "$2/merged/bulk/004"
head -c $(stat -c %s "$3/bulk/004") "$2/merged/bulk/004" | cmp - "$3/bulk/004"
diff -r "$2/merged/sizes" "$3/sizes"
"""


def test_in_a_user_namespace(site: Site, node_of: NodeOf, place: Path) -> None:
    made = node_of(site).mount()
    names = [
        name
        for name in files_of(site.reference)
        if os.lstat(site.reference / name).st_uid == os.lstat(site.reference / name).st_gid == 0
    ]
    compare(site, made.target, place, readers=2, prefix=["unshare", "-Ur", "--"], files=names)
    for name in ("upper", "work", "merged"):
        (place / name).mkdir()
    subprocess.run(
        ["unshare", "-Urm", "--", "sh", "-c", _OVERLAY, "sh", made.target, place, site.reference],
        timeout=60, check=True, capture_output=True,
    )  # fmt: skip


def test_links_that_loop_and_lead_nowhere(site: Site, node_of: NodeOf) -> None:
    target = node_of(site).mount().target
    for name in ("loop-0", "self"):
        with pytest.raises(OSError, match="Too many levels"):
            (target / "links" / name).read_bytes()
    with pytest.raises(FileNotFoundError):
        (target / "links/dangling").read_bytes()
    assert (target / "links/long").read_bytes() == (site.reference / "sizes/random-1").read_bytes()
    assert len(os.listdir(target / "large")) == 20_000


def test_extracted_without_a_mount(site: Site, place: Path, want: Found) -> None:
    tree.extract(open_store(str(site.store)), site.tree, place / "plain")
    assert (
        differences(
            scan(place / "plain", largest=MOST),
            {
                path: plain(entry)
                for path, entry in want.items()
                if stat.S_IFMT(int(entry["mode"], 8)) not in (stat.S_IFCHR, stat.S_IFBLK)
            },
        )
        == []
    )


def plain(entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` without what gives rights: owners, set-id bits, attributes but ``user.*``."""
    return entry | {
        "mode": oct(int(entry["mode"], 8) & ~(stat.S_ISUID | stat.S_ISGID)),
        "owner": (0, 0),
        "xattrs": {name: value for name, value in entry["xattrs"].items() if name.startswith(b"user.")},
    }
