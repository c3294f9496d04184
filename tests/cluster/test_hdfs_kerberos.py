"""HDFS as production has it: who uses it needs a Kerberos ticket or a token, and bytes are protected on their way."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.backends.cluster import HdfsBackend
from bootseer.config import Config
from bootseer.doctor import checks
from bootseer.errors import (
    BootseerError,
    ConfigError,
    NotWritableError,
    PrivilegeError,
    UnavailableError,
)
from bootseer.hdfs import client as hdfs
from bootseer.hdfs import datanode
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.sasl import tokens
from bootseer.stripefs import open_fs
from support.hadoop import HadoopCluster
from support.kerberos import Realm

pytestmark = [pytest.mark.hdfs, pytest.mark.kerberos]
QUICK = 5.0
LEVELS = "authentication,integrity"
"""What the cluster of this module takes; a client with the same settings uses the first."""
DATA = os.urandom(5 << 20)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HadoopCluster]:
    realm = Realm(protection=LEVELS, rpc=LEVELS)
    with HadoopCluster(tmp_path_factory.mktemp("kerberos") / "root", 3, kerberos=realm) as running:
        with running.realm.login("hdfs"):
            NameNode.connect(running.url).mkdirs("/user/alice/there")
        yield running


@pytest.fixture(scope="module")
def token(cluster: HadoopCluster) -> Path:
    return cluster.token(cluster.root / "token")


def home(cluster: HadoopCluster, user: str = "alice") -> str:
    return f"{cluster.url}/user/{user}"


def round_trip(cluster: HadoopCluster, name: str) -> None:
    """What one writes is there, by another client too."""
    fs = open_fs(home(cluster))
    with fs.create(name) as file:
        file.write(DATA)
    out = bytearray(len(DATA))
    open_fs(home(cluster)).open(name).readinto(0, memoryview(out))
    assert bytes(out) == DATA
    plain = NameNode.connect(cluster.url)
    assert plain.info(f"/user/alice/{name}") is not None


def changed(cluster: HadoopCluster, folder: Path, old: str, new: str) -> str:
    """Settings of a client with ``new`` in place of ``old``, in a ``folder`` of their own: each is read once."""
    shutil.copytree(cluster.realm.conf, folder)
    for site in folder.glob("*-site.xml"):
        site.write_text(site.read_text().replace(old, new))
    return str(folder)


@pytest.mark.parametrize(
    "wanted",
    [
        "integrity",
        {"protection": "privacy", "rpc": "privacy"},
        pytest.param({"protection": "privacy", "rpc": "privacy", "aes": True}, marks=pytest.mark.soak),
        {"protection": "integrity", "encrypt": True, "aes": True},
        {"protection": ""},
    ],
    ids=["integrity", "privacy", "privacy-aes", "encrypt", "none"],
)
def test_each_protection_is_read_and_written_by_our_engine(request, tmp_path, wanted, caplog, monkeypatch):
    """Red before: all of this went through hdfs-native."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("bootseer.hdfs.sasl.transfer._said", set[str]())  # which is said once by a process
    with contextlib.ExitStack() as stack:
        if isinstance(wanted, str):  # one of the levels of the module's cluster, which the client insists on
            cluster = request.getfixturevalue("cluster")
            settings = {"HADOOP_CONF_DIR": changed(cluster, tmp_path / "conf", LEVELS, wanted)}
            slow_one = False
        else:
            cluster = stack.enter_context(HadoopCluster(tmp_path / "root", 1, kerberos=Realm(**wanted)))
            settings, slow_one = {}, wanted["protection"] == "privacy" and "aes" not in wanted
        with cluster.realm.login("alice", **settings):
            round_trip(cluster, "striped")
            slow = [record for record in caplog.records if "cipher.suites" in record.getMessage()]
            assert bool(slow) == slow_one
            client = hdfs.HdfsClient(cluster.url)  # another implementation
            with client.create("/user/alice/native") as out:
                out.write(DATA)
            out = bytearray(len(DATA))
            HdfsBackend(home(cluster)).open("native").readinto(0, [memoryview(out)])
            assert bytes(out) == DATA
        token = cluster.token(tmp_path / "token")
        settings |= {"KRB5CCNAME": "FILE:/nonexistent", "HADOOP_TOKEN_FILE_LOCATION": str(token)}
        with cluster.realm.login("alice", **settings):
            round_trip(cluster, "by-token")


def test_a_ticket_and_a_token_say_who_one_is(cluster, token, caplog):
    with cluster.realm.login("alice", HADOOP_USER_NAME="hdfs"):
        round_trip(cluster, "by-ticket")
        assert NameNode.connect(cluster.url).way() == "ticket of alice@BOOT.TEST"
        assert "HADOOP_USER_NAME=hdfs counts for nothing" in caplog.text
    with cluster.realm.login("bob"), pytest.raises(NotWritableError, match="user=bob"):
        NameNode.connect(cluster.url).list("/user/alice")
    none = {"KRB5CCNAME": "FILE:/nonexistent", "HADOOP_TOKEN_FILE_LOCATION": str(token)}
    for host in ("localhost", "127.0.0.1"):
        with cluster.realm.login("alice", **none):
            node = NameNode.connect(cluster.url.replace("localhost", host))
            assert node.list("/user/alice")
            assert node.login == "token of alice@BOOT.TEST"
    with cluster.realm.login("bob", HADOOP_TOKEN_FILE_LOCATION=str(token)):  # it goes before the ticket, as in Hadoop
        assert NameNode.connect(cluster.url).list("/user/alice")


def test_64_nodes_with_a_token_ask_no_kdc(cluster, token):
    """Each of them reads a file: at its NameNode and its DataNodes."""
    with cluster.realm.login("alice"):
        round_trip(cluster, "by-all")
    before = cluster.realm.requests()
    script = """if True:
        import os, sys
        from bootseer.stripefs import open_fs
        nodes = []
        for _ in range(64):
            if not (pid := os.fork()):
                break
            nodes.append(pid)
        if not pid:
            file = open_fs(sys.argv[1]).open("by-all")
            out = bytearray(file.size)
            file.readinto(0, memoryview(out))
            os._exit(len(out) != int(sys.argv[2]))
        sys.exit(any([os.waitpid(pid, 0)[1] for pid in nodes]))
    """
    env = {**os.environ, **cluster.realm.environment("alice", HADOOP_TOKEN_FILE_LOCATION=str(token))}
    argv = [sys.executable, "-c", script, home(cluster), str(len(DATA))]
    assert subprocess.run(argv, env=env, timeout=120).returncode == 0
    assert cluster.realm.requests() == before
    with cluster.realm.login("alice"):
        NameNode.connect(cluster.url).close()
        cluster.realm.ticket("alice")
    assert cluster.realm.requests() > before  # the log is one of requests


def test_a_token_file_is_read_again_when_it_is_rewritten(cluster, token, tmp_path):
    file = tmp_path / "token"
    shutil.copy(token, file)
    with cluster.realm.login("bob", HADOOP_TOKEN_FILE_LOCATION=str(file)):
        node = NameNode.connect(cluster.url)
        assert node.list("/user/alice")
        cluster.token(tmp_path / "another", "bob").rename(file)
        node.close()
        assert node.list("/user/bob") == []
        with pytest.raises(NotWritableError, match="user=bob"):
            node.list("/user/alice")
        cluster.cancel(file, "bob")
        assert node.list("/user/bob") == []  # over the connection that there is
        node.close()
        began = time.monotonic()
        with pytest.raises(PrivilegeError, match=r"InvalidToken .*hdfs fetchdt"):
            node.list("/user/bob")
        assert time.monotonic() - began < QUICK
        cluster.token(tmp_path / "third", "bob").rename(file)
        assert node.list("/user/bob") == []


def test_root_has_the_rights_of_the_login_it_was_given(cluster):
    """A mount that root serves has its user's tickets and tokens in its environment, and no other."""
    with cluster.realm.login("bob"):
        mine = NameNode.connect(cluster.url)
        assert mine.list("/user/bob") == []
    with cluster.realm.login("hdfs"):
        other = NameNode.connect(cluster.url)
        assert other is not mine
        other.mkdirs("/user/alice/of-root")
    with cluster.realm.login("bob"), pytest.raises(NotWritableError, match="user=bob"):
        NameNode.connect(cluster.url).list("/user/alice")  # no connection of the superuser's is used
    with cluster.realm.login("bob"):
        other.close()
        assert other.list("/user/alice")  # whoever calls: it is root's still
        assert other.login == "ticket of hdfs@BOOT.TEST"


def test_tickets_that_somebody_else_put_where_ours_are_looked_for_are_nobodys(cluster, tmp_path):
    """Red before: root's service was whoever had been quicker to make /tmp/krb5cc_0, and its files were that user's."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    krb5 = (cluster.realm.folder / "krb5.conf").read_text()
    (tmp_path / "krb5.conf").write_text(
        krb5.replace("[realms]", f" default_ccache_name = FILE:{shared}/krb5cc_%{{uid}}\n[realms]")
    )
    planted = shared / f"krb5cc_{os.getuid()}"
    planted.write_bytes(cluster.realm.ticket("bob", cache="planted").read_bytes())
    os.chown(planted, 65534, 65534)
    planted.chmod(0o644)
    with cluster.realm.login("alice", KRB5_CONFIG=str(tmp_path / "krb5.conf")):
        del os.environ["KRB5CCNAME"]
        failing(cluster, PrivilegeError, f"the tickets in FILE:{planted} belong to user 65534.*KRB5CCNAME")
        os.environ["KRB5CCNAME"] = f"FILE:{planted}"  # named: they are meant
        assert NameNode.connect(cluster.url).way() == "ticket of bob@BOOT.TEST"
        del os.environ["KRB5CCNAME"]
        planted.chmod(0o600)
        os.chown(planted, 0, 0)
        assert NameNode.connect(cluster.url).way() == "ticket of bob@BOOT.TEST"


def failing(cluster: HadoopCluster, kind: type[BootseerError], said: str, url: str = "") -> str:
    """A first call fails soon, with one line."""
    began = time.monotonic()
    with pytest.raises(kind, match=said) as caught:
        NameNode.connect(url or cluster.url).list("/user/alice")
    assert time.monotonic() - began < QUICK
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    began = time.monotonic()
    with pytest.raises(kind, match=said):  # as doctor says
        checks.hdfs(Config(store=url or cluster.url))
    assert time.monotonic() - began < QUICK
    return str(caught.value)


def test_what_is_wrong_with_a_login_is_one_line_at_once(cluster, token, tmp_path):
    realm, gone = cluster.realm, {"KRB5CCNAME": "FILE:/nonexistent"}
    with realm.login("alice", **gone):
        assert "kinit" in failing(cluster, PrivilegeError, "Kerberos: .*[Cc]redential")
    realm.ticket("alice", "-l", "1s", cache="short")
    time.sleep(2)
    with realm.login("alice", KRB5CCNAME=f"FILE:{realm.folder}/short"):
        assert "kinit" in failing(cluster, PrivilegeError, "expired")
    with realm.login("alice", HADOOP_TOKEN_FILE_LOCATION=str(tmp_path / "none")):
        failing(cluster, ConfigError, "token file .*none .*is not there")
    (tmp_path / "torn").write_bytes(token.read_bytes()[:-9])
    with realm.login("alice", HADOOP_TOKEN_FILE_LOCATION=str(tmp_path / "torn")):
        failing(cluster, ConfigError, "no token file")
    other = tmp_path / "other"
    other.write_bytes(token.read_bytes().replace(b"127.0.0.1:", b"127.0.0.9:"))
    with realm.login("alice", HADOOP_TOKEN_FILE_LOCATION=str(other), **gone):
        failing(cluster, PrivilegeError, r"has no token for localhost:\d+: 127\.0\.0\.9")
    with realm.login("alice", HADOOP_PROXY_USER="bob"):
        assert "HADOOP_PROXY_USER" in failing(cluster, NotWritableError, "not allowed to impersonate bob")
    with realm.login("alice", HADOOP_CONF_DIR=""):
        assert "HADOOP_CONF_DIR" in failing(cluster, ConfigError, "wants Kerberos, and HADOOP_CONF_DIR is not set")
    with realm.login("alice", HADOOP_CONF_DIR="", HADOOP_TOKEN_FILE_LOCATION=str(token), **gone):
        round_trip(cluster, "without-settings")


def test_other_bad_setups_have_their_cause_and_remedy(cluster, token, tmp_path):
    """Red before: a cache below a folder "realm" was a wrong realm, a missing keytab or krb5.conf was not named, a
    folder without settings was one of another site, a token with a wrong password was a matter of the clock; "kinit"
    for a locked principal, no word of a file that is no keytab, of krb5.conf's includes and of the clock."""
    realm, krb5, none = cluster.realm, (cluster.realm.folder / "krb5.conf").read_text(), "FILE:/nonexistent"

    def file(name: str, content: str | bytes) -> str:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(tmp_path / name)

    def fresh(name: str) -> str:
        """Tickets with none for the NameNode yet, in a folder whose name says nothing."""
        return f"FILE:{realm.ticket('alice', cache=name)}"

    realm.admin(f"addprinc -randkey locked\nktadd -k {tmp_path}/locked -norandkey locked\nmodprinc -allow_tix locked")
    keytab, given = realm.keytab("alice").read_bytes(), token.read_bytes()
    at = given.rindex(b"\x15HDFS_DELEGATION_TOKEN") - 5  # in the password, which goes before the kind
    changed = given[:at] + bytes([given[at] ^ 1]) + given[at + 1 :]
    odd = file("odd", krb5.replace("[realms]", " permitted_enctypes = camellia128-cts-cmac\n[realms]"))
    old = file("old.keytab", keytab[:-36] + os.urandom(36))
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn-settings").mkdir()
    file("torn-settings/core-site.xml", "<configuration>")
    rows: list[tuple[dict[str, str], type[BootseerError], str, str]] = [
        ({"KRB5CCNAME": f"FILE:{file('empty-cache', '')}"}, PrivilegeError, "Bad format in cred", "kinit"),
        ({"KRB5CCNAME": "DIR:/nonexistent/x"}, PrivilegeError, "/nonexistent/x does not exist", "kinit"),
        ({"KRB5CCNAME": "KCM:"}, PrivilegeError, "KCM", "kinit"),
        (
            {"KRB5CCNAME": f"FILE:{realm.ticket('alice', '-s', '1h', cache='later')}"},
            UnavailableError,
            "not yet valid",
            "clock",
        ),
        (
            {"KRB5CCNAME": none, "KRB5_CLIENT_KTNAME": file("text", "hello")},
            PrivilegeError,
            "text is no keytab",
            "kinit",
        ),
        ({"KRB5CCNAME": none, "KRB5_CLIENT_KTNAME": str(tmp_path)}, PrivilegeError, "Is a directory", "kinit"),
        (
            {"KRB5CCNAME": f"FILE:{tmp_path}/of-locked", "KRB5_CLIENT_KTNAME": f"{tmp_path}/locked"},
            PrivilegeError,
            "revoked",
            "ask who runs the KDC",
        ),
        (
            {"KRB5CCNAME": fresh("c"), "KRB5_CONFIG": file("including", f"includedir /nonexistent\n{krb5}")},
            ConfigError,
            "profile directory",
            "krb5.conf",
        ),
        ({"KRB5CCNAME": fresh("a"), "KRB5_CONFIG": odd}, ConfigError, "encryption type", "permitted_enctypes"),
        (
            {"KRB5CCNAME": fresh("b"), "KRB5_CONFIG": "/nonexistent"},
            ConfigError,
            "there is no /nonexistent",
            "krb5.conf",
        ),
        ({"KRB5_CONFIG": file("nonsense", "[libdefaults\n = {")}, ConfigError, "configuration file", "krb5.conf"),
        ({"KRB5CCNAME": none, "KRB5_CLIENT_KTNAME": "/no.keytab"}, PrivilegeError, "keytab /no.keytab", "kinit"),
        (
            {"KRB5CCNAME": f"FILE:{tmp_path}/made", "KRB5_CLIENT_KTNAME": old},
            PrivilegeError,
            "integrity check.*old.keytab",
            "keytab anew",
        ),
        ({"HADOOP_CONF_DIR": str(tmp_path / "empty")}, ConfigError, "no .*/empty/hdfs-site.xml", "right site"),
        ({"HADOOP_CONF_DIR": odd}, ConfigError, "cannot read .*: Not a directory", "HADOOP_CONF_DIR"),
        ({"HADOOP_CONF_DIR": str(tmp_path / "torn-settings")}, ConfigError, "no element found", "HADOOP_CONF_DIR"),
        ({"HADOOP_TOKEN_FILE_LOCATION": file("changed", changed)}, PrivilegeError, "Mismatched", "fetchdt"),
        (
            {"HADOOP_TOKEN_FILE_LOCATION": str(token), "HADOOP_PROXY_USER": "bob", "KRB5CCNAME": none},
            PrivilegeError,
            "HADOOP_PROXY_USER is bob, and the token is of alice",
            "kinit",
        ),
    ]
    for environment, kind, cause, remedy in rows:
        with realm.login("alice", **environment):
            assert remedy in failing(cluster, kind, cause), environment


@pytest.mark.parametrize("said", ["privacy", ""], ids=["another", "none"])
def test_datanodes_that_want_another_protection_are_told_of_in_few_lines(cluster, tmp_path, said, caplog):
    """Red before: 17 lines, and the last one spoke of DataNodes that may not run."""
    name = "<name>dfs.data.transfer.protection</name><value>"
    conf = changed(cluster, tmp_path / "conf", f"{name}{LEVELS}", f"{name}{said}")
    with cluster.realm.login("alice", HADOOP_CONF_DIR=conf):
        fs = open_fs(home(cluster))
        with (
            pytest.raises(UnavailableError, match=r"no pipeline .*compare .*dfs\.data\.transfer\.protection"),
            fs.create(f"never{said}") as out,
        ):
            out.write(b"a plain file")
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 3


@pytest.mark.parametrize("minutes", [-10, 10])
@pytest.mark.parametrize("asks", ["KDC", "NameNode"])
def test_a_wrong_clock_is_one_line_at_once(cluster, tmp_path, minutes, asks):
    """At the KDC, or at the NameNode where the ticket for it is there already."""
    realm, cache = cluster.realm, cluster.realm.ticket("alice", cache=f"clock-{asks}{minutes}")
    environment = realm.environment("alice", KRB5CCNAME=f"FILE:{cache}")
    if asks == "NameNode":
        with realm.login("alice", KRB5CCNAME=f"FILE:{cache}"):
            assert NameNode.connect(cluster.url).list("/user/alice")
    argv = [str(Path(sys.executable).with_name("bootseer")), "fs", "ls", home(cluster)]
    env = {**os.environ, **environment, "LD_PRELOAD": str(wrong_clock(tmp_path)), "SHIFT": str(60 * minutes)}
    began = time.monotonic()
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)
    assert time.monotonic() - began < QUICK + 5  # the interpreter starts, too
    assert done.returncode in (69, 77)
    assert "clock" in done.stderr.lower()
    assert done.stderr.count("\n") == 1


def wrong_clock(folder: Path) -> Path:
    """A library that shifts what the C library says of the time by ``SHIFT`` seconds."""
    source, made = folder / "clock.c", folder / "clock.so"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <stdlib.h>
        #include <sys/syscall.h>
        #include <sys/time.h>
        #include <time.h>
        #include <unistd.h>
        static long shift(void) { const char *said = getenv("SHIFT"); return said ? atol(said) : 0; }
        int clock_gettime(clockid_t id, struct timespec *now) {
            int status = syscall(SYS_clock_gettime, id, now);
            if (id == CLOCK_REALTIME) now->tv_sec += shift();
            return status;
        }
        int gettimeofday(struct timeval *now, void *zone) {
            struct timespec real;
            clock_gettime(CLOCK_REALTIME, &real);
            now->tv_sec = real.tv_sec;
            now->tv_usec = real.tv_nsec / 1000;
            return 0;
        }
        time_t time(time_t *out) {
            struct timespec real;
            clock_gettime(CLOCK_REALTIME, &real);
            if (out) *out = real.tv_sec;
            return real.tv_sec;
        }
        """
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def test_a_proxied_user_is_the_one_who_acts(cluster):
    with cluster.realm.login("hdfs", HADOOP_PROXY_USER="bob"):
        assert NameNode.connect(cluster.url).list("/user/bob") == []
        with pytest.raises(NotWritableError, match="user=bob"):
            NameNode.connect(cluster.url).list("/user/alice")


def test_a_service_that_is_not_the_sites_namenode_is_not_believed(cluster, tmp_path):
    for principal, kind, said in (
        ("nn/localhost@BOOT.TEST", ConfigError, "says that it is hdfs/localhost"),
        ("hdfs/_HOST@OTHER.TEST", BootseerError, "Kerberos: .*(realm|KDC|database)"),
    ):
        conf = changed(cluster, tmp_path / principal.partition("/")[0], "hdfs/localhost@BOOT.TEST", principal)
        with cluster.realm.login("alice", HADOOP_CONF_DIR=conf):
            failing(cluster, kind, said)


@pytest.mark.parametrize("frozen", [False, True], ids=["gone", "frozen"])
def test_a_kdc_that_is_away_is_told_soon_and_not_needed_by_who_has_logged_in(cluster, frozen):
    realm = cluster.realm
    fresh = f"FILE:{realm.ticket('alice', cache=f'fresh-{frozen}')}"  # without a ticket for the NameNode
    with realm.login("alice"):
        assert NameNode.connect(cluster.url).list("/user/alice")
        with realm.without_kdc(frozen=frozen):
            NameNode.connect(cluster.url).close()
            round_trip(cluster, f"kdc-{frozen}")
    with realm.without_kdc(frozen=frozen), realm.login("alice", KRB5CCNAME=fresh):
        assert "KDC" in failing(cluster, UnavailableError, "KDC")
    with realm.login("alice", KRB5CCNAME=fresh):
        assert NameNode.connect(cluster.url).list("/user/alice")


def test_a_ticket_that_is_replaced_while_one_works_is_used(cluster):
    realm = cluster.realm
    cache = realm.ticket("alice", cache="renewed")
    with realm.login("alice", KRB5CCNAME=f"FILE:{cache}"):
        node = NameNode.connect(cluster.url)
        assert node.list("/user/alice")
        node.close()
        realm.ticket("alice", "-l", "1s", cache="renewed")
        time.sleep(2)
        threading.Timer(1.0, lambda: realm.ticket("alice", cache="renewed")).start()
        assert node.list("/user/alice")  # waits for it, as for a NameNode that is away


@pytest.mark.root
def test_a_save_and_a_mount_outlive_the_kdc_and_their_ticket(cluster, tmp_path):
    """Right bytes or an error within the deadline, and with a new ticket the next try works."""
    realm, config = cluster.realm, Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    cache, expires = realm.ticket("alice", "-l", "15s", cache="chaos"), time.monotonic() + 15
    with realm.login("alice", KRB5CCNAME=f"FILE:{cache}"):
        fs = open_fs(home(cluster))
        for name in ("a", "b"):
            with fs.create(name) as file:
                file.write(DATA)
        mounted = fsmount.start(fs.url, tmp_path / "mnt", config=config)
        try:
            assert (mounted.mountpoint / "a").read_bytes() == DATA
            with fs.create("saved") as file:
                file.write(DATA)
                with realm.without_kdc():
                    time.sleep(max(expires + 1 - time.monotonic(), 0))
                    NameNode.connect(cluster.url).close()
                    began = time.monotonic()
                    with pytest.raises(PrivilegeError, match="expired"):
                        NameNode.connect(cluster.url).list("/user/alice")
                    assert time.monotonic() - began < 15
                    writing = threading.Thread(target=file.write, args=(DATA,))
                    writing.start()
                    with contextlib.suppress(OSError):  # where it has to ask the NameNode anew
                        assert (mounted.mountpoint / "a").read_bytes() == DATA
                realm.ticket("alice", cache="chaos")
                writing.join()
            out = bytearray(2 * len(DATA))
            fs.open("saved").readinto(0, memoryview(out))
            assert out == DATA + DATA
            assert [(mounted.mountpoint / name).read_bytes() for name in ("a", "b")] == [DATA] * 2
        finally:
            mounted.unmount()


@pytest.mark.root
@pytest.mark.parametrize(
    "end", ["cancelled", *(pytest.param(end, marks=pytest.mark.soak) for end in ("expired", "gone", "torn"))]
)
def test_a_save_and_a_mount_outlive_their_token(cluster, tmp_path, end, config):
    """The NameNode starts anew, so that all must log in again, and their token counts no longer: right bytes or an
    error within the deadline, and with another token in the file the next try works."""
    with contextlib.ExitStack() as stack:
        file = cluster.token(tmp_path / "token")
        shutil.copy(file, tmp_path / "first")
        stack.enter_context(
            cluster.realm.login("alice", KRB5CCNAME="FILE:/nonexistent", HADOOP_TOKEN_FILE_LOCATION=str(file))
        )
        fs = open_fs(f"{home(cluster)}/of-token-{end}")
        for name in ("a", "b"):
            with fs.create(name) as out:
                out.write(DATA)
        mounted = fsmount.start(fs.url, tmp_path / "mnt", config=config)
        stack.callback(mounted.unmount)
        assert (mounted.mountpoint / "a").read_bytes() == DATA
        saving = fs.create("saved")
        saving.write(DATA)
        if end == "cancelled":
            cluster.cancel(tmp_path / "first")
        elif end == "expired":
            life = {f"dfs.namenode.delegation.{what}": "1" for what in ("token.max-lifetime", "token.renew-interval")}
            cluster.restart_namenode(settings=life)
            cluster.token(file)
            time.sleep(1)
        elif end == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-9])
        forever = {f"dfs.namenode.delegation.token.{what}": "86400000" for what in ("max-lifetime", "renew-interval")}
        cluster.restart_namenode(settings=forever)
        said = {"gone": "is not there", "torn": "no token file"}.get(end, "InvalidToken")
        began = time.monotonic()
        with pytest.raises(BootseerError, match=said):
            NameNode.connect(cluster.url).list("/user/alice")
        first = time.monotonic() - began
        began = time.monotonic()
        with contextlib.suppress(OSError):
            assert (mounted.mountpoint / "b").read_bytes() == DATA
        read = time.monotonic() - began
        assert (first < 15, read < 70) == (True, True), (first, read)
        failed: list[BootseerError] = []

        def write() -> None:
            try:
                saving.write(DATA)
            except BootseerError as exc:
                failed.append(exc)

        writing = threading.Thread(target=write)
        writing.start()
        cluster.token(tmp_path / "new").rename(file)
        writing.join(90)
        assert not writing.is_alive()
        began = time.monotonic()
        assert [(mounted.mountpoint / name).read_bytes() for name in ("a", "b")] == [DATA] * 2
        if not failed:
            saving.finish()
            back = bytearray(2 * len(DATA))
            fs.open("saved").readinto(0, memoryview(back))
            assert back == DATA + DATA
        else:
            saving.abandon()
        round_trip(cluster, "after")
        assert time.monotonic() - began < 90


def test_a_frozen_datanode_delays_reads_and_writes_for_seconds(cluster, caplog):
    """Red before: 57 s for the read, and after 30 s an error of the write."""
    data = os.urandom(64 << 20)
    with cluster.realm.login("alice"):
        fs = open_fs(home(cluster))
        with fs.create("big") as file:
            file.write(data)
        with cluster.frozen(1):
            began, out = time.monotonic(), bytearray(len(data))
            open_fs(home(cluster)).open("big").readinto(0, memoryview(out))
            assert out == data
            took = time.monotonic() - began
        open_fs(home(cluster)).open("big").readinto(0, memoryview(out))  # all are trusted again
        with cluster.frozen(1):
            began = time.monotonic()
            with fs.create("big2") as file:
                file.write(data)
            assert took + time.monotonic() - began < 25
        silent = [line for line in caplog.messages if "does not answer" in line]
        assert silent
        assert not [line for line in silent if line.count("127.0.0.1:") > 1]  # those that live are not among them
        out = bytearray(len(data))
        fs.open("big2").readinto(0, memoryview(out))
        assert out == data


def test_small_packets_of_a_datanode_are_told_with_the_setting_that_mends_them(cluster, caplog):
    """After a login Hadoop's DataNodes send packets of io.file.buffer.size, 4 KiB unless a site says more."""
    datanode.tell_small.cache_clear()
    with cluster.realm.login("alice"):
        round_trip(cluster, "small-packets")
        assert caplog.text.count("io.file.buffer.size") == 1


def test_the_command_line_says_it_in_one_line(cluster):
    env = {**os.environ, **cluster.realm.environment("alice", KRB5CCNAME="FILE:/nonexistent")}
    argv = [str(Path(sys.executable).with_name("bootseer")), "fs", "ls", home(cluster)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 77
    assert "kinit" in done.stderr
    assert done.stderr.count("\n") == 1


def test_secrets_are_in_no_log_and_no_error(cluster, token, caplog):
    caplog.set_level(logging.DEBUG)
    with cluster.realm.login("alice", HADOOP_TOKEN_FILE_LOCATION=str(token)):
        (found,) = tokens.read(str(token))
        round_trip(cluster, "logged")
    for secret in (found.password.hex(), repr(found.password)[2:-1]):
        assert secret not in caplog.text
        assert secret not in repr(found)
