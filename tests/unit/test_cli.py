"""The command line as a whole: what it costs to start, that help is everywhere, and what a mistake looks like."""

import functools
import json
import os
import pty
import re
import resource
import select
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer

from bootseer.cli import main
from bootseer.errors import DataError
from bootseer.image import record
from bootseer.objects import open_store
from support import clireference, forked
from support.records import record_of
from support.waits import until


@pytest.fixture
def typed(monkeypatch, capsys):
    """What a command line ends with, in this process: its exit code, output and errors."""

    def call(words):
        monkeypatch.setattr(sys, "argv", ["bootseer", *words.split()])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code, *capsys.readouterr()

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # to have it back
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


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
        """Of a processor: others may be busy."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    cost = [seconds("import bootseer") - seconds("pass") for _ in range(7)]
    assert statistics.median(cost) < 0.05


@pytest.mark.parametrize("words", ["run -h", "-v run -h", "--config image run -h"])
def test_a_verb_loads_no_other(words):
    code = "import sys\nfrom bootseer.cli import main\ntry: main.main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=True)
    shown, loaded = done.stdout.rstrip("\n").rsplit("\n", 1)
    assert " run [OPTIONS]" in shown
    assert {name for name in loaded.split() if name.startswith("bootseer.cli.")} <= {
        "bootseer.cli.main",
        "bootseer.cli.run",
        "bootseer.cli._completed",
        "bootseer.cli._shared",
        "bootseer.cli.verbs",
    }


@pytest.mark.parametrize("words", ["--help run", "-h"])
def test_all_verbs_are_there_where_none_is_named(words):
    assert "doctor" in forked.cli(*words.split()).stdout


def test_a_start_loads_nothing_that_converts_or_publishes():
    code = "import sys, bootseer.launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"bootseer.image.conversion", "bootseer.env.publish", "bootseer.erofs"}.intersection(done.stdout.split())


@pytest.mark.parametrize(
    "verb",
    ["", "doctor", "run", "clean", "unmount", "image", "image convert", "image run", "image mount", "image ls",
     "image extract", "env", "env run", "fs", "fs put", "fs mount", "cache", "store", "profile", "profile show"],
)  # fmt: skip
def test_every_verb_has_help(verb, typed):
    code, shown, _ = typed(f"{verb} --help")
    assert (code, "Usage" in shown) == (0, True)


@functools.cache
def verbs():
    """Name -> command, of every verb that is not hidden."""

    def walk(command, name):
        if inner := getattr(command, "commands", None):
            for sub, verb in inner.items():
                yield from walk(verb, f"{name} {sub}".strip())
        elif not command.hidden:
            yield name, command

    return dict(walk(clireference.command_line(), ""))


def test_there_are_at_most_50_verbs_and_each_option_says_what_it_is_for():
    assert len(verbs()) <= 50
    for name, verb in verbs().items():
        assert [one.name for one in verb.params if not one.help and one.param_type_name == "option"] == [], name


NUMBERS = [
    (name, parameter, number)
    for name, verb in verbs().items()
    for parameter in verb.params
    if parameter.type.name in ("integer", "integer range", "float", "float range")
    or parameter.metavar in ("SIZE", "AGE")
    for number in ("nan", "inf", "-inf", "1e300", "9" * 400, "9" * 15 + "T", "-1")
]


@pytest.mark.parametrize(("verb", "parameter", "number"), NUMBERS, ids=lambda one: getattr(one, "name", str(one)[:9]))
def test_a_number_that_is_none_or_too_large_is_a_mistake(verb, parameter, number):
    command = verbs()[verb]
    words = ["x" for one in command.params if one.required for _ in range(max(one.nargs, 1))]
    with pytest.raises(typer.BadParameter):
        command.make_context(verb, [f"{parameter.opts[0]}={number}", *words])


def options(verb):
    return {option: parameter.name for parameter in verb.params for option in parameter.opts}


def test_a_command_keeps_its_own_options():
    """From the first word of the command on, nothing is an option of ours."""
    found = {
        name: verb
        for name, verb in verbs().items()
        if any(parameter.name == "command" and parameter.nargs == -1 for parameter in verb.params)
    }
    assert found.keys() == {"image run", "env run", "exec", "profile wrap"}
    for name, verb in found.items():
        assert verb.context_settings["allow_interspersed_args"] is False, name


def test_an_option_means_the_same_at_every_verb():
    """`-n` and its like have one long name each; what removes says before what would go; what tells has JSON."""
    short = {}
    for name, verb in verbs().items():
        for option, parameter in options(verb).items():
            if option in ("-n", "-q", "-o", "-e", "-w", "-r", "-R"):
                assert short.setdefault(option, parameter) == parameter, name
        last = name.split()[-1]
        if last in ("rm", "gc"):
            assert {"--dry-run", "-n", "--json"} <= options(verb).keys(), name
        if last in ("ls", "ps", "inspect", "show", "diff", "explain", "verify", "status", "mount", "unmount"):
            assert "--json" in options(verb), name
    assert short["-n"] == "dry_run"
    for group in ("image", "env", "fs"):
        assert {f"{group} {verb}" for verb in ("inspect", "rm")} <= verbs().keys()
    assert {"cache gc", "store gc", "fs gc"} <= verbs().keys()


def test_every_verb_says_in_a_sentence_what_it_does():
    for name, verb in verbs().items():
        first = verb.help.strip().split("\n\n")[0]
        assert first[0].isupper(), name
        assert first.rstrip().endswith("."), name


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("ls", "bootseer store ls, "),
        ("ps", "bootseer image status"),
        ("gc", "bootseer clean, "),
        ("image gc", "bootseer clean, "),
        ("env ls", "bootseer store ls, "),
        ("imag run", "did you mean bootseer image?"),
        ("nonsense", "bootseer --help"),
        ("env run pip install X", "bootseer env run --target DIR pip install X"),
        ("profile show", "name event files"),
        ("profile wrap pip install X", "bootseer profile wrap --stage env pip install X"),
        ("logs", "bootseer profile show"),
        ("pull python:3", "bootseer image convert"),
        ("image pull python:3", "bootseer image convert"),
        ("config show", "bootseer doctor --settings"),
        ("stop", "bootseer unmount"),
        ("store prune", "bootseer store gc"),
        ("cache prune", "did you mean bootseer cache gc"),
        ("cache clear", "did you mean bootseer cache gc"),
        ("cache size", "did you mean bootseer cache ls"),
        ("cache du", "did you mean bootseer cache ls"),
        ("store size", "did you mean bootseer store du"),
        ("image delete a", "did you mean bootseer image rm"),
        ("fs delete a", "did you mean bootseer fs rm"),
        ("env list", "did you mean bootseer store ls"),
        ("env create", "did you mean bootseer env run"),
        ("profile view", "did you mean bootseer profile show"),
        ("profile report", "did you mean bootseer profile show"),
        ("info", "did you mean bootseer doctor"),
        ("image build .", "did you mean bootseer image convert"),
        ("node ps", "did you mean bootseer node status"),
        ("node start", "did you mean bootseer node serve"),
        ("node stop", "did you mean bootseer node drain"),
        ("node list", "did you mean bootseer node status"),
        ("version", "bootseer --version"),
        ("image rm", "REF"),
        ("doctor --jsn", "--json"),
        ("cache gc --age", "bootseer cache gc --help"),
        ("image run python.tar sh", "docker-archive:python.tar"),
        ("image convert ./python.tar.gz", "docker-archive:./python.tar.gz"),
        ("gc", "bootseer store gc"),
        ("images", "verb 'images'; did you mean bootseer image ls?"),
        ("rmi bert:1", "did you mean bootseer image rm?"),
        ("delete x", "did you mean bootseer image rm, bootseer env rm, bootseer fs rm?"),
        ("build .", "did you mean bootseer image convert?"),
        ("stop x", "did you mean bootseer unmount?"),
        ("prune", "did you mean bootseer store gc?"),
        ("image prune", "did you mean bootseer store gc?"),
        ("cache purge", "did you mean bootseer cache gc?"),
        ("fs cat x", "did you mean bootseer fs get?"),
        ("log", "did you mean bootseer profile show?"),
        ("top", "did you mean bootseer image status?"),
        ("stats", "did you mean bootseer node status?"),
        ("run -it ubuntu bash", "bootseer image run REF COMMAND"),
        ("run --rm ubuntu bash", "bootseer image run REF COMMAND"),
        ("run python train.py", "bootseer image run REF python train.py"),
    ],
)
def test_what_is_typed_first_is_answered_in_one_line(words, hint, monkeypatch, typed):
    monkeypatch.delenv("BOOTSEER_EVENTS", raising=False)
    code, shown, said = typed(words)
    assert code in (2, 78)
    assert (shown, len(said.splitlines())) == ("", 1)
    assert hint in said


MAKERS = {"run", "image convert", "env run", "store init", "image run", "image mount"}
"""Verbs that make the store, or say that an image is not in it."""


@pytest.mark.parametrize(
    "verb", [name for name in verbs() if "--store" in options(verbs()[name]) and name not in MAKERS]
)
def test_a_store_that_is_not_there_is_an_error_of_all_that_reads_one(verb, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path / "c"))
    words = ["a" * 64 for one in verbs()[verb].params if one.required]
    for option in ("--file=x", "--repair"):
        words = [option, *words] if option.partition("=")[0] in options(verbs()[verb]) else words
    code, shown, said = typed(f"{verb} --store nope {' '.join(words)}")
    assert (code, shown, len(said.splitlines())) == (66, "", 1), said
    assert f"there is no store {tmp_path}/nope" in said
    assert not (tmp_path / "nope").exists()


def test_the_store_of_a_new_node_is_empty(tmp_path, monkeypatch, typed):
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("BOOTSEER_STORE", raising=False)
    for verb in ("ls", "du"):
        assert typed(f"store {verb}") == (0, "", f"bootseer: nothing is in store {tmp_path}/store yet: bootseer image "
                                                 "convert and bootseer env run fill it\n")  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_values_images_and_keys(shell, tmp_path):
    """Shells evaluate what they are told, and what is in a store others have named."""
    store, key = open_store(tmp_path / "s"), "c" * 64
    for image, name in (("a", "localhost/bert:1"), ("b", "$(touch here)"), ("d", "`x`"), ("e", "x\\\\"), ("f", "*")):
        record.save(store, msgspec.structs.replace(record_of(image, "0" * 64), reference=name))
    store.put(f"env/snapshots/{key}/{key}.json", b"")
    env = {"PATH": os.environ["PATH"], "BOOTSEER_STORE": store.url, "_BOOTSEER_COMPLETE": f"complete_{shell}"}
    env |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}

    def completed(line):
        words = {
            "COMP_WORDS": line.replace(" ", "\n"),
            "COMP_CWORD": str(line.count(" ")),
            "_TYPER_COMPLETE_ARGS": line,
        }
        done = forked.cli(env=env | words)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout.replace("\\\\:", ":")

    assert "unpack" in completed("bootseer env run --restore ")
    assert key[:12] in completed("bootseer env inspect c")
    shown = completed("bootseer image inspect ")
    assert "localhost/bert:1" in shown
    for image in "abdef":
        assert 12 * image in shown
    assert not [sign for sign in ("touch", "`", "x\\", "*\n") if sign in shown.replace("'*: ", "")]
    assert "localhost/bert:1" not in completed("bootseer image inspect x")


def test_a_store_that_does_not_answer_completes_nothing():
    """Red before: a handler in Python, which never ran while a folder of the store did not answer."""
    look = "from itertools import repeat; from types import SimpleNamespace; from bootseer.cli import _completed as c;"
    hangs = "c._SECONDS = 1; c.completion(lambda store: sum(repeat(0)))(SimpleNamespace(params={}), '')"
    done = subprocess.run([sys.executable, "-c", look + hangs], capture_output=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGALRM, b"", b"")


def test_settings_are_shown_with_their_sources(tmp_path, monkeypatch):
    file = tmp_path / "site.toml"
    file.write_text('store = "s3://name:word@bucket/x?token=abc"\nfill_quiet = 3\n')
    monkeypatch.setenv("BOOTSEER_FILL_QUIET", "4")
    monkeypatch.setenv("BOOTSEER_REGISTRY_MIRRORS", "docker.io=name:word@mirror:5000")
    done = forked.cli("--config", str(file), "doctor", "--settings", "--json")
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert found["fill_quiet"] == {"name": "fill_quiet", "value": 4, "source": "BOOTSEER_FILL_QUIET"}
    assert found["store"]["source"] == str(file)
    assert found["record_seconds"]["source"] == "default"
    table = forked.cli("--config", str(file), "doctor", "--settings").stdout
    assert "BOOTSEER_FILL_QUIET" in table
    for text in (done.stdout, table):
        assert "bucket/x" in text
        assert "mirror:5000" in text
        assert "word" not in text
        assert "abc" not in text


def test_the_version_names_the_sources(typed):
    code, shown, _ = typed("--version")
    assert (code, bool(re.fullmatch(r"bootseer 0\.1\.0 \([0-9a-f]{8}\)\n", shown))) == (0, True), shown


def test_a_settings_file_that_is_not_there():
    done = forked.cli("--config", "none.toml", "doctor", "--settings")
    assert (done.returncode, len(done.stderr.splitlines())) == (78, 1)
    assert "none.toml" in done.stderr


def test_exec_needs_a_command():
    done = forked.cli("exec", "--", "--")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_quiet_and_verbose_together():
    assert forked.cli("-q", "-v", "doctor", "--settings").returncode == 2


def test_env_run_leaves_the_options_of_the_command_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BOOTSEER_STATE_DIR", str(tmp_path / "state"))
    done = forked.cli(
        "env", "run", "--no-snapshot", "--target", tmp_path / "env", "echo", "--target", "/mine", "--json"
    )
    assert (done.returncode, done.stdout) == (0, "--target /mine --json\n"), done.stderr


def test_settings_that_are_not_understood(monkeypatch):
    monkeypatch.setenv("BOOTSEER_FILL_QUIET", "many")
    done = forked.cli("doctor")
    assert done.returncode == 78
    assert "fill_quiet" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_target_that_begins_with_a_tilde_is_in_the_home_folder(tmp_path, monkeypatch, typed):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("BOOTSEER_STORE", str(tmp_path))
    _, shown, _ = typed("env run --target=~/venv --dry-run --json true")
    assert json.loads(shown)["document"]["targets"] == ["/home/me/venv"]


def test_bash_completes_a_verb(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = """
        eval "$(bootseer --show-completion)"
        COMP_WORDS=(bootseer doc) COMP_CWORD=1
        _bootseer_completion bootseer
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["doctor"], done.stderr


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("bootseer image inspect localhost/bert:1", "localhost/bert:1.2"),
        ("bootseer image inspect localhost/bert:", "localhost/bert:1.2"),
        ("bootseer image inspect localhost/be", "localhost/bert:1.2"),
        ("bootseer image inspect docker-archive:/a", "docker-archive:/a.tar"),
        ("bootseer env run --restore=unp", "--restore=unpack"),
        ("bootseer env run --restore unp", "--restore unpack"),
    ],
)
def test_bash_completes_words_that_it_cuts(line, whole, tmp_path, monkeypatch):
    """Bash itself, on a terminal: it cuts words at colons, and completes what follows the last one."""
    store = open_store(tmp_path / "s")
    for digit, name in (("1", "localhost/bert:1.2"), ("a", "docker-archive:/a.tar"), ("2", "x:1")):
        record.save(store, msgspec.structs.replace(record_of(digit, "0" * 64), reference=name))
    monkeypatch.setenv("BOOTSEER_STORE", store.url)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    pid, terminal = pty.fork()
    if not pid:
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    shown = b""
    with os.fdopen(terminal, "r+b", buffering=0) as screen:

        def shows(pattern: str) -> bool:
            nonlocal shown
            if select.select([screen], [], [], 0.1)[0]:
                shown += screen.read(4096)
            return re.search(pattern.encode(), shown) is not None

        screen.write(b"""bind 'set enable-bracketed-paste off'; eval "$(bootseer --show-completion)"; echo rea""dy\n""")
        until(lambda: shows("ready\r"), 60.0)
        screen.write(f"{line}\t\x01echo '<\x05>'\n".encode())
        until(lambda: shows("\n<.*>\r"), 60.0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert re.findall(rb"\n<(.*?) *>\r", shown)[-1].decode().endswith(whole), shown


def test_what_others_wrote_does_not_move_the_cursor(capsys):
    """Names and platforms of images are in messages."""
    with pytest.raises(SystemExit) as ended:
        main.fail(DataError("image x is for \x1b[2J\r/a\nb", hint="convert caf\u00e9"))
    assert ended.value.code == 65
    assert capsys.readouterr().err == "bootseer: image x is for \\x1b[2J\\r/a\\nb; convert caf\u00e9\n"


def test_the_name_of_the_newest_checkpoint_does_not_move_the_cursor(tmp_path):
    (tmp_path / "step\x1b[2J\n1").mkdir()
    (tmp_path / "step\x1b[2J\n1/a").touch()
    for words in (("commit", tmp_path / "step\x1b[2J\n1"), ("ls", "--latest", tmp_path)):
        done = forked.cli("fs", *words)
        assert (done.returncode, done.stdout.count("\n"), "\x1b" in done.stdout) == (0, 1, False), done


@pytest.mark.parametrize("verb", ["store ls", "store du", "store gc -n", "image rm x"])
def test_names_in_a_store_do_not_move_the_cursor(verb, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a\nb\x1b[2J.json").write_text("x")
    done = forked.cli(*verb.split(), "--store", tmp_path)
    said = [one for one in done.stderr.splitlines() if "[2J" in one]
    assert said, done
    assert not [one for one in said if "\\n" not in one or "\x1b" in one]


def test_a_group_without_a_verb_shows_its_help(typed):
    code, shown, said = typed("cache")
    assert code == 2
    assert "Usage: bootseer cache" in shown + said
    assert "did you mean" not in said


def test_an_interrupt_where_python_takes_no_exception_is_one_all_the_same() -> None:
    """In a callback of a weak reference, as the import system has them, the exception would be printed and forgotten,
    and later signals ignored."""
    program = (
        "import os, signal, sys, time, weakref; from bootseer.cli.main import carry_out\n"
        "class One: pass\n"
        "def command():\n"
        "    one = One(); kept = weakref.ref(one, lambda _: (os.kill(os.getpid(), signal.SIGINT), sum(range(9999))))\n"
        "    try: del one; time.sleep(20)\n"
        "    finally: print('undone', flush=True)\n"
        "carry_out(command)"
    )
    done = forked.run("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "undone\n", "")


@pytest.mark.parametrize("words", ["doctor --settings", "doctor --settings --json", "image --help"])
@pytest.mark.parametrize(
    ("to", "code", "said"),
    [(">/dev/full", 74, "bootseer: cannot finish: No space left on device; "), (">&-", 0, "")],
)
def test_an_output_that_takes_nothing_is_at_most_one_line(words, to, code, said):
    shell = f"{sys.executable} -m bootseer.cli.main {words} {to}"
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr[: len(said)]) == (code, said)
    assert done.stderr.count("\n") == bool(said)


@pytest.mark.parametrize(
    "words",
    [
        "store ls --store registry://alice:wonder@127.0.0.1:9/x",
        "store ls --store s3+x://alice:wonder@bucket/x",
        "profile export {events} --to http://alice:wonder@127.0.0.1:9/events --timeout 1",
        "image inspect https://alice:wonder@127.0.0.1:9/x",
        "image inspect alice:wonder@127.0.0.1:9/x",
        "image inspect alice:wonder@127.0.0.1:9/x@sha256:" + 64 * "a",
        "env run pip install --index-url https://alice:wonder@pypi.site/simple",
        "fs ls https://alice:wonder@127.0.0.1:9/x",
    ],
)
def test_a_mistake_shows_no_password(words, typed, tmp_path):
    (events := tmp_path / "e.jsonl").write_text("{}\n")
    code, out, err = typed(words.format(events=events))
    assert code
    assert err.startswith("bootseer: ")
    assert "wonder" not in out + err


def test_a_summary_that_cannot_be_written_is_told_early_or_changes_no_exit_code(typed, tmp_path, monkeypatch, caplog):
    (job := tmp_path / "job.toml").write_text('[job]\nname = "x"\ncommand = ["true"]\n[image]\nref = "x:1/y"\n')
    began = []
    ended = msgspec.defstruct("Ended", [("exit_code", int)])
    monkeypatch.setattr("bootseer.launch.node.start", lambda *_, **__: began.append(1) or ended(3))
    code, _, err = typed(f"run {job} --summary {tmp_path}/none/s.json")
    assert (code, err.count("\n"), began) == (66, 1, [])
    assert typed(f"run {job} --summary /dev/full")[0] == 3
    assert "cannot write summary /dev/full: [Errno 28] No space left" in caplog.text
    assert typed(f"run {job} --summary {tmp_path}/s.json")[0] == 3
    assert json.loads((tmp_path / "s.json").read_text()) == {"exit_code": 3}
    assert typed(f"run {job} --without nothing --summary {tmp_path}/t.json")[0] == 78
    assert not (tmp_path / "t.json").exists()
    os.mkfifo(tmp_path / "pipe")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr("bootseer.launch.node.start", lambda *_, **__: os.read(read, 1) or ended(3))
    assert typed(f"run {job} --summary {tmp_path}/pipe")[0] == 3
    assert json.loads(os.read(read, 1000)) == {"exit_code": 3}
    os.close(read)
