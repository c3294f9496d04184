"""``bootseer fs`` as it is typed: what it prints, its JSON, and one clear line with an exit code for every mistake."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from bootseer import units
from bootseer.backends.folder import FolderBackend
from bootseer.cli.fs import app
from bootseer.errors import BootseerError, from_os_error
from bootseer.stripefs import open_fs
from support import forked

BIG = bytes(i % 251 for i in range(251)) * 20_000  # 5 MB: striped


class Done:
    def __init__(self, code: int, out: str, error: str) -> None:
        self.code, self.out, self.error = code, out, error

    @property
    def json(self):
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> Done:
        done = CliRunner().invoke(app, list(args))
        exc = done.exception
        if isinstance(exc, OSError):  # as `bootseer.cli.main` does
            exc = from_os_error(exc, "finish")
        if isinstance(exc, BootseerError):
            return Done(exc.exit_code, done.stdout, str(exc))
        assert exc is None or isinstance(exc, SystemExit), repr(exc)
        return Done(done.exit_code, done.stdout, done.stderr)

    return call


def test_every_verb_has_help_and_takes_json(run):
    overview = run("--help").out
    for verb in ("put", "get", "cp", "ls", "inspect", "mv", "rm", "commit", "fsck", "gc", "mount"):
        assert f" {verb} " in overview
        done = run(verb, "--help")
        assert (done.code, "--json" in done.out) == (0, True), verb


def test_a_file_there_and_back(run, tmp_path):
    Path("big").write_bytes(BIG)
    done = run("put", "big", "store/big", "--width", "2", "--unit", "512K")
    assert (done.code, done.out) == (0, "store/big: 1 file, 5.0 MB stored\n")
    assert run("inspect", "store/big", "--json").json["width"] == 2
    assert run("inspect", "store/big", "--json").json["unit"] == 512 << 10
    assert run("get", "store/big", "back").out == "back: 1 file, 5.0 MB copied\n"
    assert Path("back").read_bytes() == BIG
    assert "2 x 524288  big" in run("ls", "store").out
    assert run("fsck", "--read", "store", "--json").json == {"url": "store", "files": 1, "bytes": len(BIG), "ok": True}


def test_a_file_goes_into_a_folder(run):
    Path("f").write_bytes(b"x")
    run("put", "f", "store/new/")
    run("put", "f", "store/new/g")
    run("put", "f", "store")
    assert [row["path"] for row in run("ls", "store/new", "--json").json] == ["new/f", "new/g"]
    assert Path("store/f").read_bytes() == b"x"


def test_a_folder_as_a_checkpoint(run):
    Path("ck/sub").mkdir(parents=True)
    Path("ck/model").write_bytes(BIG)
    Path("ck/sub/config").write_bytes(b"{}")
    assert run("put", "ck", "run/step-1", "--commit").out == "run/step-1: 2 files, 5.0 MB committed\n"
    done = run("put", "ck", "run/step-2", "--commit", "--json").json
    assert [file["striped"] for file in done["files"]] == [True, False]
    assert run("ls", "--latest", "run").out.strip().endswith("/run/step-2")
    assert run("inspect", "run/step-2", "--json").json["checkpoint"] == "complete"
    refused = run("rm", "run/step-2/model")
    assert (refused.code, "listed by the COMMIT of checkpoint" in refused.error) == (73, True)
    assert run("rm", "run/step-2/model", "--force").code == 0
    assert run("ls", "--latest", "run", "--json").json["path"] == "run/step-1"
    assert "lacks model" in run("inspect", "run/step-2").out
    assert run("get", "run/step-1", "out", "--json").code == 0
    assert sorted(path.name for path in Path("out").rglob("*")) == ["config", "model", "sub"]
    again = run("put", "ck", "run/step-1", "--commit")
    assert (again.code, "has a COMMIT already" in again.error) == (73, True)
    run("put", "ck", "other/step-1")
    assert len(run("commit", "other/step-1", "--json").json["files"]) == 2


def test_many_small_files_go_with_large_ones(run):
    for number in range(60):
        Path(f"many/d{number % 3}").mkdir(parents=True, exist_ok=True)
        Path(f"many/d{number % 3}/f{number:02}").write_bytes(bytes([number]) * number * 50)
    Path("many/d1/large").write_bytes(BIG)
    assert run("put", "many", "store/many").out.startswith("store/many: 61 files, ")
    Path("many/d1/f01").write_bytes(b"newer")
    done = run("put", "many", "store/many", "--json").json
    assert [file["path"] for file in done["files"] if file["striped"]] == ["many/d1/large"]
    back = run("get", "store/many", "back", "--json").json["files"]
    assert [row["path"] for row in back] == sorted(row["path"] for row in back)
    wanted = {path.relative_to("many"): path.read_bytes() for path in Path("many").rglob("*") if path.is_file()}
    assert {path.relative_to("back"): path.read_bytes() for path in Path("back").rglob("*") if path.is_file()} == wanted


@pytest.mark.parametrize("verb", ["put", "get"])
def test_the_first_of_many_small_files_that_fails_ends_it(run, verb):
    source, target = (Path("many"), Path("store/many")) if verb == "put" else (Path("store/many"), Path("many"))
    source.mkdir(parents=True)
    for number in range(40):
        Path(source, f"f{number:02}").write_bytes(b"x")
    Path(target, "f20").mkdir(parents=True)
    failed = run(verb, str(source), str(target))
    assert (failed.code, "f20: it is a folder" in failed.error) == (73, True)
    assert failed.error.count("\n") <= 1
    assert not [path for path in target.iterdir() if path.name.startswith(".tmp-")]


def test_copies_have_stripes_of_their_own(run):
    Path("ck").mkdir()
    Path("ck/model").write_bytes(BIG)
    run("put", "ck", "run/step-1", "--commit", "--width", "3")
    assert run("cp", "run/step-1", "other/step-1", "--verify").out == "other/step-1: 1 file, 5.0 MB copied\n"
    first, second = (run("inspect", f"{place}/step-1/model", "--json").json for place in ("run", "other"))
    assert first["uuid"] != second["uuid"]
    assert (second["width"], second["digest"]) == (3, first["digest"])
    assert run("ls", "--latest", "other").code == 0
    again = run("cp", "run/step-1", "other/step-1", "--resume")
    assert again.out.splitlines() == [
        "other/step-1: 0 files, 0 B copied",
        "1 file, 5.0 MB left alone: there already",
    ]
    assert run("cp", "run/step-1", "other/step-1").code == 73
    run("cp", "run/step-1/model", "flat", "--width", "1", "--unit", "4K")
    assert run("inspect", "flat", "--json").json["unit"] == 4096
    assert run("fsck", "run").code == 0
    for source, target, code in (("run", "run/copy", 73), ("run/step-1/model", "run/step-1/", 78), ("no", "x", 66)):
        assert run("cp", source, target).code == code


def test_a_copy_of_damaged_bytes_is_not_made(run):
    Path("big").write_bytes(BIG)
    run("put", "big", "store/big")
    stripe = next(Path("store/.bsx").glob("*.1"))
    data = bytearray(stripe.read_bytes())
    data[5000] ^= 1
    stripe.write_bytes(data)
    done = run("cp", "store/big", "copy")
    assert (done.code, "is damaged" in done.error) == (65, True)
    assert not Path("copy").exists()


def test_imports_in_place_and_to_another_place(run):
    Path("plain/sub").mkdir(parents=True)
    Path("plain/model").write_bytes(BIG)
    Path("plain/sub/config").write_bytes(b"{}")
    done = run("cp", "--stripe", "plain", "copy/plain", "--width", "2", "--json").json
    assert [(file["path"].rpartition("/")[2], file["striped"]) for file in done["files"]] == [
        ("model", True),
        ("config", False),
    ]
    again = run("cp", "--stripe", "plain", "copy/plain", "--json").json
    assert {file["skipped"] for file in again["files"]} == {"there already"}
    assert Path("plain/model").read_bytes() == BIG
    assert run("cp", "--stripe", "plain").out.splitlines() == [
        "plain: 1 file, 5.0 MB striped",
        "1 file, 2 B left alone: small files stay plain",
    ]
    assert "1 file, 5.0 MB left alone: striped already" in run("cp", "--stripe", "plain").out
    with open_fs("plain").open("model") as file:
        assert file.read(0, file.size) == BIG


def test_an_import_in_place_gives_up_when_the_file_changes(run, monkeypatch):
    Path("model").write_bytes(BIG)
    from bootseer.stripefs import copy

    def change(name: str) -> None:
        if name == "stripefs.copy.check":
            Path("model").write_bytes(BIG + b"more")

    monkeypatch.setattr(copy.faults, "point", change)
    done = run("cp", "--stripe", "model")
    assert (done.code, "was changed while it was imported" in done.error) == (73, True)
    assert Path("model").read_bytes() == BIG + b"more"
    assert list(Path(".bsx").iterdir()) == []


def test_names_are_changed_and_removed(run):
    Path("big").write_bytes(BIG)
    run("put", "big", "store/big")
    run("put", "big", "store/d/big")
    assert run("mv", "store/big", "store/new").code == 0
    assert run("mv", "store/new", "store/d/").code == 0
    assert [row["path"] for row in run("ls", "store/d", "--json").json] == ["d/big", "d/new"]
    assert run("rm", "store/d").code == 78
    said = run("rm", "-r", "-n", "store/d", "--json").json
    assert (said["dry_run"], [one["path"] for one in said["removed"]]) == (True, ["d/big", "d/new"])
    assert run("ls", "store/d").code == 0
    assert run("rm", "-r", "store/d").code == 0
    assert run("rm", "store/none").code == 66
    assert run("fsck", "store").code == 0
    assert [path.name for path in Path("store").rglob("*")] == [".bsx"]


def test_fsck_and_gc(run):
    Path("big").write_bytes(BIG)
    run("put", "big", "store/a")
    assert run("fsck", "store").out == "1 folder, 1 file: 0 errors, 0 of garbage\n"
    Path("store/a").unlink()
    Path("store/.tmp-" + "ab" * 16).write_bytes(b"12345")
    done = run("fsck", "store")
    assert done.code == 65
    assert done.error == "store has errors: store/a: lost-pointer; run again with --repair"
    assert "temporary" in done.out
    document = run("fsck", "store", "--json").json
    assert [finding["kind"] for finding in document["report"]["findings"]] == ["temporary", "lost-pointer"]
    done = run("fsck", "store", "--repair")
    assert (done.code, "store/a: rebuilt it from store/.bsx/" in done.out) == (0, True)
    assert "0 of 1 pieces of garbage removed" in run("gc", "store").out
    assert "1 of 1 pieces of garbage would be removed" in run("gc", "store", "--age", "0", "--dry-run").out
    assert run("gc", "store", "--age", "0", "--json").json["bytes"] == 5
    assert not Path("store/.tmp-" + "ab" * 16).exists()
    next(Path("store/.bsx").glob("*.0")).unlink()
    done = run("fsck", "store", "--repair", "--json")
    assert (done.code, done.json["repairs"]) == (65, [])
    assert done.error.endswith("store/a: missing-stripe; restore it from a copy")
    shutil.rmtree("store/.bsx")
    assert "store/a: stripes-elsewhere; copy what is in .bsx there, too" in run("fsck", "store").error


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["ls", "hdfs://127.0.0.1:1/a/b"], 69, "Connection refused"),
        (["ls", "hdfs://no-such-host.invalid:8020/a/b"], 69, "not known"),
        (["ls", "hdfs://host:port/a"], 78, "has no port number"),
        (["ls", "hdfs:///a/b"], 78, "not an HDFS URL"),
        (["ls", "odd://a/b"], 71, "odd"),
        (["ls", ""], 78, "names no store"),
        (["ls", "none"], 66, "no file or folder none"),
        (["ls", "none/of/these"], 66, "no file or folder these"),
        (["inspect", "none"], 66, "none"),
        (["get", "none", "out"], 66, "none"),
        (["get", "store/f", "file/out"], 73, "is a file, a folder is needed"),
        (["get", "store", "file"], 73, "is a file, a folder is needed"),
        (["get", "store/f", "/sys/out"], 73, "/sys"),
        (["get", "store/f", "pipe"], 73, "pipe: it is not a file"),
        (["get", "store/f", "link-to-pipe"], 73, "pipe: it is not a file"),
        (["get", "store/f", "loop"], 73, "loop: it is a link to itself"),
        (["get", "store/f", "x" * 300], 73, "File name too long"),
        (["ls", "http://127.0.0.1:1/a"], 69, "reachable"),
        (["ls", "nosuch://bucket/x"], 71, "cannot open store nosuch://"),
        (["ls", "store/none"], 66, "no file or folder none"),
        (["mv", "none", "x"], 66, "no file or folder /"),
        (["mount", "store", "file"], 73, "file is a file, a folder is needed"),
        (["put", "none", "store/x"], 66, "no file or folder none"),
        (["put", "file", "store/f/g"], 73, "a file is in the way"),
        (["put", "file", "/sys/kernel/x"], 73, "/sys/kernel"),
        (["put", "file", "store/x", "--commit"], 78, "leave --commit away"),
        (["put", "file", "store/x", "--width", "0"], 78, "stripe width 0"),
        (["put", "file", "store/x", "--unit", "5000"], 78, "stripe unit 5000"),
        (["put", "file", "store/x", "--unit", "big"], 2, "'big' is not a size"),
        (["put", "/dev/zero", "store/x"], 78, "neither a file nor a folder"),
        (["put", "file", "../x/../../../x\0y"], 78, "names no store"),
        (["commit", "store"], 0, ""),
        (["commit", "store/f"], 66, "is a file, a checkpoint is a folder"),
        (["commit", "none"], 66, "none"),
        (["ls", "--latest", "store"], 66, "no complete checkpoint"),
        (["ls", "--latest", "store/f"], 66, "is a file"),
        (["fsck", "--read", "none"], 66, "none"),
        (["fsck", "none"], 66, "none"),
        (["gc", "none"], 66, "none"),
        (["gc", "store/f"], 66, "is a file, gc cleans folders"),
        (["gc", "store", "--age", "soon"], 2, "'soon' is not an age"),
        (["cp", "none", "x"], 66, "none"),
        (["cp", "store/f", "store/f"], 78, "are the same"),
        (["cp", "store/f", "hdfs://127.0.0.1:1/a"], 69, "Connection refused"),
        (["mv", "store/f", "memory://x/y"], 78, "within one storage"),
        (["rm", "/"], 78, "is the root"),
        (["cp", "--stripe", "none"], 66, "none"),
        (["cp", "--stripe", "file", "x", "--width", "300"], 78, "stripe width 300"),
        (["mount", "none", "mnt"], 66, "none"),
        (["mount", "store/f", "mnt"], 66, "a mount needs a folder"),
    ],
)
def test_mistakes_are_one_clear_line(run, args, code, says):
    Path("file").write_bytes(b"x")
    Path("store").mkdir()
    Path("store/f").write_bytes(b"x")
    os.mkfifo("pipe")
    Path("link-to-pipe").symlink_to("pipe")
    Path("loop").symlink_to("loop")
    done = run(*args)
    assert Path("pipe").is_fifo()
    assert Path("link-to-pipe").is_symlink()
    assert Path("loop").is_symlink()
    assert (done.code, says.lower() in done.error.lower()) == (code, True), done.error
    if code != 2:
        assert len(done.error.splitlines()) <= 1


@pytest.mark.parametrize("verb", ["put", "cp"])
def test_a_full_disk_is_one_line_and_leaves_nothing(run, monkeypatch, verb):
    Path("model").write_bytes(BIG)
    monkeypatch.setenv("BOOTSEER_FAULTS", "stripefs.write.close=enospc")
    done = run(verb, "model", "store/model")
    assert (done.code, "No space left" in done.error) == (74, True)
    assert [path for path in Path("store").rglob("*") if path.is_file()] == []


def test_the_whole_command(tmp_path):
    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return forked.cli("fs", *args, cwd=tmp_path)

    done = call("inspect", "none")
    assert (done.returncode, done.stdout) == (66, "")
    assert done.stderr == f"bootseer: no file or folder none in {tmp_path}\n"
    (tmp_path / "store").mkdir()
    (tmp_path / f"store/.tmp-{'ab' * 16}").write_bytes(b"")
    done = call("gc", "store", "--age", "0", "--json")
    assert (done.returncode, len(json.loads(done.stdout)["removed"]), done.stderr) == (0, 1, "")


def test_sizes_and_ages():
    sizes = {"0": 0, "4096": 4096, "9 B": 9, "4k": 4096, "1 MiB": 1 << 20}
    sizes |= {"2G": 2 << 30, "2Gi": 2 << 30, "2GB": 2 << 30}
    assert {text: units.parse_size(text) for text in sizes} == sizes
    assert [units.parse_age(text) for text in ("0", "90s", "1.5m", "2h", "1d")] == [0, 90, 90, 7200, 86400]
    ages = {-5: "0 s", 42: "42 s", 119: "119 s", 120: "2 min", 7200: "2 h", 172800: "2 d"}
    assert {seconds: units.age_text(seconds) for seconds in ages} == ages


def test_what_would_break_a_checkpoint_is_refused(run):
    for name, data in (("ck", BIG), ("other", BIG[::-1])):
        Path(name).mkdir()
        Path(name, "model").write_bytes(data)
    run("put", "ck", "run/step-1", "--commit")
    run("put", "other", "run/step-2", "--commit")
    run("put", "other/model", "run/m")
    for args in (
        ["rm", "-r", "run/step-1/.bsx"],
        ["mv", "run/step-1/model", "run/elsewhere"],
        ["put", "other", "run/step-1"],
        ["put", "other/model", "run/step-1/sub/new"],
        ["cp", "run/step-2/model", "run/step-1/model"],
        ["mv", "run/m", "run/step-1/model"],
    ):
        done = run(*args)
        said = "COMMIT of checkpoint" in done.error or "has a COMMIT already" in done.error
        assert (done.code, said, "\n" in done.error) == (73, True, False), args
        assert run("fsck", "--read", "run/step-1").code == 0
    assert run("mv", "--force", "run/m", "run/step-1/model").code == 0
    assert "changed after COMMIT" in run("inspect", "run/step-1").out
    assert run("cp", "--force", "run/step-2", "run/step-1").code == 0
    assert run("fsck", "--read", "run").code == 0
    assert run("mv", "run/step-2", "kept/step-2").code == 0
    assert run("fsck", "--read", "kept").code == 0
    assert run("ls", "--latest", "run").out.strip().endswith("/run/step-1")
    assert [run("rm", "-r", f"{url}").code for url in ("run/step-1", "kept/step-2")] == [0, 0]
    assert not [path for path in Path().rglob("*") if path.name == "COMMIT"]


def test_a_checkpoint_that_lacks_a_file_is_not_copied_out(run):
    Path("ck").mkdir()
    for name in "ab":
        Path("ck", name).write_bytes(name.encode())
    run("put", "ck", "run/step-1", "--commit")
    Path("run/step-1/a").unlink()
    for url in ("run/step-1", "run"):
        done = run("get", url, "out")
        assert (done.code, "lacks a" in done.error) == (65, True)
        assert not Path("out").exists()


def test_what_cannot_be_committed_is_refused_before_the_claim(run):
    Path("empty/sub").mkdir(parents=True)
    done = run("put", "empty", "run/step-1", "--commit")
    assert (done.code, "no files to commit" in done.error) == (65, True)
    Path("named").mkdir()
    Path("named/COMMIT").write_bytes(b"mine")
    done = run("put", "named", "run/step-1", "--commit")
    assert (done.code, "the name of the manifest" in done.error) == (78, True)
    Path("hidden/.bsx").mkdir(parents=True)
    Path("hidden/.bsx/x").write_bytes(b"mine")
    Path("hidden/a").write_bytes(b"mine")
    for flags in ([], ["--commit"]):
        done = run("put", "hidden", "run/step-1", *flags)
        assert (done.code, "the store's own" in done.error) == (78, True)
    assert not Path("run").exists()


def test_a_folder_does_not_move_into_itself(run):
    Path("a").mkdir()
    Path("a/x").write_bytes(b"x")
    done = run("mv", "a", "a/b/c")
    assert (done.code, "inside of it" in done.error) == (73, True)
    assert [path.name for path in Path("a").iterdir()] == ["x"]


def test_a_file_is_got_through_a_link(run):
    Path("store").mkdir()
    Path("store/f").write_bytes(b"content")
    Path("d").mkdir()
    Path("link").symlink_to("d/real")
    for _ in range(2):
        assert run("get", "store/f", "link").code == 0
        assert (Path("link").is_symlink(), Path("d/real").read_bytes()) == (True, b"content")


def test_a_folder_of_an_object_store_has_no_time(run):
    MemoryFileSystem.store.clear()
    assert run("put", __file__, "memory://bucket/x/f").code == 0
    assert "mtime" not in (done := run("inspect", "memory://bucket/x")).out, done.out
    assert "mtime: 20" in run("inspect", "memory://bucket/x/f").out
    MemoryFileSystem.store.clear()


def test_a_store_without_credentials_is_said_so(run, monkeypatch):
    class NoCredentialsError(Exception):
        pass

    def info(self, path, **options):
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    done = run("ls", "memory://bucket/x")
    assert (done.code, "no credentials were found" in done.error) == (78, True)


@pytest.mark.root
def test_root_copies_nothing_to_where_others_lead_names_elsewhere(run, tmp_path):
    store, theirs, passwd = tmp_path / "store", tmp_path / "theirs", tmp_path / "passwd"
    for folder in (store / "sub", theirs / "out"):
        folder.mkdir(parents=True)
    for name in ("model", "sub/passwd"):
        (store / name).write_text("weights")
    passwd.write_text("root's")
    (theirs / "out/model").symlink_to(passwd)
    (theirs / "out/sub").symlink_to(tmp_path)
    (theirs / "out/gone").symlink_to(tmp_path / "made")
    subprocess.run(["chown", "-hR", "65534:65534", theirs], check=True)
    for source, target in (("", "theirs/out"), ("/model", "theirs/out/sub/new")):
        done = run("get", f"{store}{source}", target)
        assert (done.code, "which user 65534 made, is not followed" in done.error) == (73, True), (target, done.error)
    for target in ("theirs/out/model", "theirs/out/gone", "theirs/new"):  # a link of others gives way to the file
        assert run("get", f"{store}/model", target).code == 0
        assert ((tmp_path / target).read_text(), (tmp_path / target).is_symlink()) == ("weights", False)
    assert passwd.read_text() == "root's"
    assert sorted(os.listdir(tmp_path)) == ["passwd", "store", "theirs"]


def test_a_copy_goes_where_the_kernel_finds_its_name(run, tmp_path):
    for name in ("store/f", "deep/in/f", "here/f"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "here/link").symlink_to("../deep/in")
    assert run("get", f"{tmp_path}/store/f", "here/link/../new").code == 0
    assert sorted(os.listdir(tmp_path / "deep")) == ["in", "new"]
    assert sorted(os.listdir(tmp_path / "here")) == ["f", "link"]


@pytest.mark.root
def test_root_s_own_link_to_a_folder_of_others_stays_and_its_target_is_written(run, tmp_path, monkeypatch):
    """As /dev/stdout, which leads to where somebody's output goes. Red before: the file took the link's place."""
    store, theirs, far = tmp_path / "store", tmp_path / "theirs", tmp_path / "far"
    for folder in (store, theirs / "out", far):
        folder.mkdir(parents=True)
    (store / "model").write_text("weights")
    subprocess.run(["chown", "-R", "65534:65534", theirs], check=True)
    (tmp_path / "last").symlink_to("theirs/out/last")
    assert run("get", f"{store}/model", "last").code == 0
    assert ((theirs / "out/last").read_text(), (tmp_path / "last").is_symlink()) == ("weights", True)

    def swapped(backend, path):
        made(backend, path)
        (theirs / "out").rename(theirs / "before")
        (theirs / "out").symlink_to(far)

    made = FolderBackend.make_folder
    monkeypatch.setattr(FolderBackend, "make_folder", swapped)
    assert run("get", f"{store}/model", "theirs/out/sub/model").code != 0
    assert os.listdir(far) == []
