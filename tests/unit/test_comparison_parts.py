import os

from bootseer.demo import ingredients, tree
from bootseer.demo.starts import losses


def test_every_project_of_the_index_has_the_wheels(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("Typing_Ext-1.0-py3-none-any.whl", "numpy-2.0+a-cp311-x.whl", "numpy-2.1-cp311-x.whl"):
        (wheels / name).touch()
    ingredients.link_projects(wheels, tmp_path / "simple")
    assert sorted(p.name for p in (tmp_path / "simple").iterdir()) == ["numpy", "typing-ext"]
    assert (tmp_path / "simple/numpy/numpy-2.0+a-cp311-x.whl").exists()


def test_losses_are_read_from_a_noisy_log():
    assert losses('warning: x\n{"step": 3, "loss": 1.5}\n{"other": 1}\n{"step": 4, "loss": 1}\n') == {3: 1.5, 4: 1.0}


def _fill(root):
    (root / "d").mkdir(parents=True)
    (root / "d/f").write_bytes(b"one")
    (root / "g").write_bytes(b"two")
    os.symlink("d/f", root / "l")
    for path in ("d/f", "g", "d", "l"):
        os.utime(root / path, ns=(1, 1_000_000_001), follow_symlinks=False)


def test_equal_trees_have_no_differences(tmp_path):
    _fill(tmp_path / "a")
    _fill(tmp_path / "b")
    assert tree.differences(tmp_path / "a", tmp_path / "b") == (4, [])


def test_every_kind_of_difference_is_seen(tmp_path):
    changes = {
        "content": lambda r: ((r / "g").write_bytes(b"twO"), os.utime(r / "g", ns=(1, 1_000_000_001))),
        "mtime": lambda r: os.utime(r / "g", ns=(1, 1_000_000_002)),
        "mode": lambda r: (r / "g").chmod(0o600),
        "missing": lambda r: (r / "g").unlink(),
        "extra": lambda r: (r / "new").touch(),
        "link": lambda r: ((r / "l").unlink(), os.symlink("g", r / "l"), os.utime(r / "l", ns=(1, 1_000_000_001),
                           follow_symlinks=False)),
        "xattr": lambda r: os.setxattr(r / "g", "user.x", b"1"),
    }  # fmt: skip
    _fill(tmp_path / "a")
    for name, change in changes.items():
        other = tmp_path / name
        _fill(other)
        change(other)
        os.utime(other / "d", ns=(1, 1_000_000_001))
        assert tree.differences(tmp_path / "a", other)[1], name
