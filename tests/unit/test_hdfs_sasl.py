"""Logins at daemons of HDFS: DIGEST-MD5 and its ciphers against bytes that Hadoop sent, token files, and what lies."""

import base64
import contextlib
import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, ConfigError, UnsupportedError
from bootseer.hdfs import nameservice
from bootseer.hdfs.framing import delimited, frame
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.rpc import RpcClient
from bootseer.hdfs.sasl import digest, gssapi, login, negotiation, tokens, transfer
from bootseer.hdfs.sasl.digest import Digest
from bootseer.hdfs.sasl.gssapi import Kerberos
from bootseer.hdfs.sasl.login import LoginFailed
from bootseer.hdfs.sasl.streams import Aes, Framed
from bootseer.hdfs.sasl.transfer import Guard, KeyRefused, TokenRefused
from support.fakenamenode import Call, Server
from support.waits import together

UNTIL = 1e9
RECORDED = json.loads((Path(__file__).parents[1] / "golden/hdfs/transfers-1.json").read_text())
"""Logins at a DataNode of Hadoop 3.4.2 and the answer to a read after each, as it sent them. The tokens are of a
cluster that ended with the recording."""


def test_the_example_of_the_standard(monkeypatch):
    """RFC 2831, 4."""
    monkeypatch.setattr(digest, "base64", SimpleNamespace(b64encode=lambda data: b"OA6MHXh6VqTrRk"))
    asked = Digest(b"chris", b"secret", "imap/elwood.innosoft.com", login.QOPS)
    said = asked.answer(
        b'realm="elwood.innosoft.com",nonce="OA6MG9tEQGm2hh",qop="auth",algorithm=md5-sess,charset=utf-8'
    )
    assert b"response=d388dad90d4bbd760a152321f2143af7" in said
    asked.finish(b"rspauth=ea40f60335c427b5527b84dbabcdfffd")
    with pytest.raises(LoginFailed, match="does not know the password"):
        asked.finish(b"rspauth=ea40f60335c427b5527b84dbabcdfffe")
    with pytest.raises(LoginFailed):
        Digest(b"chris", b"secret", "a/b", login.QOPS).finish(b"rspauth=")


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_what_hadoop_said_is_understood(name, monkeypatch):
    told = {key: base64.b64decode(value) for key, value in RECORDED[name].items()}
    monkeypatch.setattr(digest.secrets, "token_bytes", lambda size: bytes(size))
    if name == "privacy-3des":
        monkeypatch.setattr(digest, "_CIPHERS", (b"3des",))
    token = wire.Token(identifier=told["identifier"], password=told["password"], kind="", service="")
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    handshake = Guard(lambda: True, lambda until: None).handshake(9866, token, UNTIL)
    assert handshake.begin() + handshake.answer(told["challenge"]) == told["begin"] + told["response"]
    assert handshake.answer(told["proof"]) == b""
    assert type(handshake.stream) is {"authentication": type(None), "privacy-aes": Aes}.get(name, Framed)
    stream = handshake.stream
    if stream is not None:
        assert b"".join(stream.out([told["request"]])) == told["sealed request"]
        assert b"".join(stream.plain(bytes([byte])) for byte in told["sealed answer"]) == told["answer"]
    changed = bytearray(told["proof"])
    changed[20] ^= 1
    other = Guard(lambda: True, lambda until: None).handshake(9866, token, UNTIL)
    other.answer(told["challenge"])
    with pytest.raises(LoginFailed):
        other.answer(bytes(changed))


@pytest.mark.parametrize("cipher", ["rc4", "3des"])
@given(pieces=st.lists(st.binary(max_size=400), max_size=4))
def test_sealed_messages_are_read_in_order_or_not_at_all(cipher, pieces):
    one, other = (digest.cipher(cipher.encode(), bytes(range(16)), decrypt=way) for way in (False, True))
    here, there = Digest(b"", b"", "", ()), Digest(b"", b"", "", ())
    here.cipher = there.cipher = cipher
    here._sign = there._check = b"k"
    here._encrypt, there._decrypt = one, other
    sealed = [here.wrap(piece) for piece in pieces]
    assert [there.unwrap(each) for each in sealed] == pieces
    if sealed:
        with pytest.raises(LoginFailed, match="changed on its way"):
            there.unwrap(sealed[-1])  # again


@given(st.binary(max_size=200))
def test_any_bytes_are_a_login_or_an_error(data):
    handshake = transfer.Handshake(Digest(b"a", b"b", "hdfs/0", login.QOPS), lambda: None)
    with contextlib.suppress(LoginFailed):
        handshake.answer(data)
    with contextlib.suppress(LoginFailed):
        Digest(b"a", b"b", "hdfs/0", ("auth-conf",)).answer(b'nonce="x",' + data)
    with contextlib.suppress(OSError):
        Framed(Digest(b"a", b"b", "hdfs/0", ("auth",))).plain(b"\x7f\xff\xff\xff" + data)


def test_what_a_datanode_refuses_is_known():
    lost: list[int] = []

    def told(**fields):
        handshake = transfer.Handshake(Digest(b"a", b"b", "hdfs/0", login.QOPS), lambda: lost.append(1))
        handshake.answer(wire.TransferSasl(**fields).SerializeToString())

    with pytest.raises(TokenRefused, match="it is old"):
        told(status=2, message="it is old\n\tat x", token_error=True)
    with pytest.raises(KeyRefused):
        told(status=1, message="unknown key")
    assert lost == [1]
    with pytest.raises(LoginFailed):
        told(status=2)


def test_when_a_connection_to_a_datanode_begins_with_a_login(tmp_path, monkeypatch):
    token = wire.Token(identifier=b"i", password=b"p", kind="", service="")
    secured = Guard(lambda: True, lambda until: None)
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert transfer.OPEN.handshake(9866, token, UNTIL) is None
    assert secured.handshake(9866, token, UNTIL)
    assert secured.handshake(1004, token, UNTIL) is None  # root's port
    for number, value in enumerate(("", "privacy")):
        (folder := tmp_path / str(number)).mkdir()
        rows = f"<property><name>dfs.data.transfer.protection</name><value>{value}</value></property>"
        (folder / "hdfs-site.xml").write_text(f"<configuration>{rows}</configuration>")
        monkeypatch.setenv("HADOOP_CONF_DIR", str(folder))
        assert nameservice.setting("dfs.data.transfer.protection") == value
        assert bool(secured.handshake(9866, token, UNTIL)) == bool(value)
        assert transfer.is_slow() == bool(value)


def test_a_key_that_a_datanode_refused_is_asked_for_once_anew_by_whoever_comes_next():
    """Red before: one flag for all, which the next connection took, whichever key it had."""
    asked: list[float] = []

    def ask(until: float) -> wire.DataKey:
        asked.append(until)
        return wire.DataKey(id=1, pool="p", nonce=b"%d" % len(asked), key=b"k", expires=1 << 50)

    token, guard = wire.Token(identifier=b"i", password=b"p", kind="", service=""), Guard(lambda: False, ask)
    first, second = guard.handshake(1004, token, 7.0), guard.handshake(1004, token, 8.0)
    assert asked == [7.0]
    for handshake in (first, second):  # both have the old one
        with pytest.raises(KeyRefused):
            handshake.answer(wire.TransferSasl(status=1).SerializeToString())
        guard.handshake(1004, token, 9.0)
    assert asked == [7.0, 9.0]


def test_what_a_site_allows():
    assert login.qops("") == ["auth", "auth-int", "auth-conf"]
    assert login.qops("authentication") == ["auth", "auth-int", "auth-conf"]
    assert login.qops("privacy") == ["auth-conf"]
    assert login.qops("Integrity, authentication") == ["auth-int", "auth", "auth-conf"]
    assert login.qops("privacy,") == ["auth-conf"]
    with pytest.raises(LoginFailed, match="offers auth, and the site wants auth-conf") as caught:
        Digest(b"a", b"b", "hdfs/0", login.qops("privacy")).answer(b'nonce="a",qop="auth"')
    assert isinstance(caught.value.error("read"), UnsupportedError)


@pytest.mark.parametrize("value", ["privcy", "${x.protection}", "privacy;integrity", "authentication,privcy"])
def test_a_protection_that_nobody_knows_is_an_error(value, tmp_path, monkeypatch):
    """Red before: any was good enough."""
    with pytest.raises(ConfigError, match=r"hadoop\.rpc\.protection has "):
        login.qops(value)
    rows = f"<property><name>dfs.data.transfer.protection</name><value>{value}</value></property>"
    (tmp_path / "hdfs-site.xml").write_text(f"<configuration>{rows}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    token = wire.Token(identifier=b"i", password=b"p", kind="", service="")
    with pytest.raises(ConfigError, match=r"dfs\.data\.transfer\.protection has "):
        Guard(lambda: True, lambda until: None).handshake(9866, token, UNTIL)


def test_a_challenge_longer_than_any_is_refused_unread():
    """Red before: looking through it took seconds to hours."""
    with pytest.raises(LoginFailed, match="too long"):
        Digest(b"a", b"b", "hdfs/0", login.QOPS).answer(b"a" * 4096)


@pytest.mark.parametrize(
    "body",
    [
        frame(wire.RpcResponseHeader(call_id=1, status=1, exception="java.io.FileNotFoundException")),
        frame(wire.RpcResponseHeader(call_id=1, status=0), wire.RpcSasl(state=0, token=b"plain")),
    ],
    ids=["error", "success"],
)
def test_what_comes_outside_of_the_seal_is_not_believed(body):
    """Red before: it was an exception of the NameNode, or a message for the mechanism."""
    stream = negotiation.Wrapped(SimpleNamespace(unwrap=lambda sealed: sealed), 1 << 20)
    with pytest.raises(LoginFailed, match="unprotected"):
        stream.plain(body)
    right = frame(wire.RpcResponseHeader(call_id=1, status=0), wire.RpcSasl(state=5, token=b"sealed"))
    assert negotiation.Wrapped(SimpleNamespace(unwrap=lambda sealed: sealed), 1 << 20).plain(right) == b"sealed"


# -- tickets ----------------------------------------------------------------------------------------------------------


class Library:
    """What is asked of libgssapi. ``status``: its answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.status, self.released = status, 0
        monkeypatch.setattr(gssapi, "_call", self._call)
        monkeypatch.setattr(gssapi, "_lib", lambda: SimpleNamespace(gss_release_buffer=self._release))

    def _call(self, name: str, *arguments: object) -> int:
        self.calls.append((name, arguments))
        if name == "init_sec_context" and self.status >> 16:
            raise LoginFailed("no", "")
        return self.status

    def _release(self, *arguments: object) -> None:
        self.released += 1


@pytest.mark.parametrize("status", [2, 4, 8, 16])
def test_a_message_that_comes_twice_or_out_of_order_is_refused(status, monkeypatch):
    """Red before: one was taken three times."""
    library = Library(monkeypatch)
    made = Kerberos("hdfs@localhost", login.QOPS)
    assert made.unwrap(b"x") == b""
    library.status = status
    with pytest.raises(LoginFailed, match="twice or out of order") as caught:
        made.unwrap(b"x")
    assert caught.value.passing
    assert library.released == 2


def test_the_library_has_one_user_of_a_login_at_a_time(monkeypatch):
    """Over the connection to a NameNode one thread sends while another one receives. Red before."""
    Library(monkeypatch)
    made, using, most = Kerberos("hdfs@localhost", login.QOPS), list[str](), list[int]()

    def use(name: str, *arguments: object) -> int:
        using.append(name)
        most.append(len(using))
        time.sleep(0.02)
        using.remove(name)
        return 0

    monkeypatch.setattr(gssapi, "_call", use)
    together(lambda use: use(b"x"), [made.wrap, made.unwrap, made.wrap])
    assert most == [1, 1, 1]


def test_a_forked_child_does_not_call_the_library_for_what_its_parent_had(monkeypatch):
    Library(monkeypatch)
    made = Kerberos("hdfs@localhost", login.QOPS)
    made._name = gssapi.c_void_p(1)
    monkeypatch.setattr(gssapi, "_lib", lambda: os._exit(1))
    if not (pid := os.fork()):
        made.__del__()
        os._exit(0)
    made._name = gssapi.c_void_p()
    assert os.waitpid(pid, 0)[1] == 0


def test_what_a_failed_step_says_is_released(monkeypatch):
    library = Library(monkeypatch, 1 << 16)
    with pytest.raises(LoginFailed):
        Kerberos("hdfs@localhost", login.QOPS).answer(b"")
    assert library.released == 1


@pytest.mark.parametrize("said", ["", "FILE:/caf\udce9"], ids=["default", "variable"])
def test_one_stays_who_one_is_when_the_variable_changes(said, tmp_path, monkeypatch):
    """Red before: without the variable at first, tickets were where it said later; a name that is no UTF-8 was a
    crash."""
    (tmp_path / "krb5.conf").write_text("[libdefaults]\ndefault_ccache_name = FILE:/of/alice\n")
    monkeypatch.setenv("KRB5_CONFIG", str(tmp_path / "krb5.conf"))
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("KRB5CCNAME", said) if said else monkeypatch.delenv("KRB5CCNAME", raising=False)
    if not said and not login.default_tickets():
        pytest.skip("without libkrb5.so.3")
    identity = login.Identity.now("", "")
    assert identity.tickets == (said or "FILE:/of/alice")
    library, right = Library(monkeypatch, 1), os.fsencode(said or "FILE:/of/alice")
    for now in (said, "FILE:/of/bob"):
        if now:
            monkeypatch.setenv("KRB5CCNAME", now)
        Kerberos("hdfs@localhost", login.QOPS, identity.tickets).answer(b"")
    named = [given[0] for name, given in library.calls if name == "krb5_ccache_name"]
    assert named == [right] * (2 if said else 1)  # else the library looks there by itself


# -- token files ------------------------------------------------------------------------------------------------------


def text(data: bytes) -> bytes:
    return bytes([len(data)]) + data if len(data) < 128 else b"\x8f" + bytes([len(data)]) + data


def old(*entries: tuple[str, str, bytes, bytes]) -> bytes:
    rows = b"".join(
        b"".join(map(text, (b"alias", identifier, password, kind.encode(), service.encode())))
        for kind, service, identifier, password in entries
    )
    return b"HDTS\0" + bytes([len(entries)]) + rows + b"\0"


def new(*entries: tuple[str, str, bytes, bytes]) -> bytes:
    made = wire.Credentials()
    for kind, service, identifier, password in entries:
        made.tokens.add(alias="a").token.MergeFrom(
            wire.Token(identifier=identifier, password=password, kind=kind, service=service)
        )
    return b"HDTS\1" + delimited(made)


@pytest.mark.parametrize("form", [old, new])
def test_the_token_of_a_file_is_that_for_the_namenode(form, tmp_path):
    file, identifier = tmp_path / "tokens", b"\0" + text(b"alice") + text(b"yarn") + text(b"")
    services = ("10.0.0.1:8020", "NN.site:8020", "ha-hdfs:prod", "[fe80::1]:8020")
    entries = [(tokens.KIND, service, identifier, b"s3cret" * 30) for service in services]
    file.write_bytes(form(("kms-dt", "10.0.0.1:8020", b"x", b"y"), *entries))
    found = tokens.read(str(file))
    assert [each.service for each in found] == list(services)
    assert found[0].owner == "alice"
    assert "s3cret" not in repr(found)

    def fitting(*at):
        return [token.service for token in found if token.fits(*at)]

    assert fitting("10.0.0.1", "other", 8020, "") == ["10.0.0.1:8020"]
    assert fitting("10.0.0.2", "nn.SITE", 8020, "") == ["NN.site:8020"]
    assert fitting("10.0.0.2", "nn1", 8020, "prod") == ["ha-hdfs:prod"]
    assert fitting("fe80:0:0:0:0:0:0:1", "x", 8020, "") == ["[fe80::1]:8020"]
    assert fitting("10.0.0.1", "nn.site", 8021, "other") == []


@pytest.mark.parametrize("form", [old, new])
def test_torn_and_foreign_files_are_no_token_files(form, tmp_path):
    whole = form((tokens.KIND, "a:1", b"i" * 20, b"p" * 20))
    file = tmp_path / "tokens"
    with pytest.raises(LoginFailed, match="is not there") as caught:
        tokens.read(str(file))
    assert isinstance(caught.value.error("look"), ConfigError)  # else a store would be taken for empty
    for data in (b"", b"HDTS", b"HDTS\2abc", b"#!/bin/sh", *(whole[:cut] for cut in range(5, len(whole) - 1))):
        file.write_bytes(data)
        with pytest.raises(LoginFailed, match="no token file") as caught:
            tokens.read(str(file))
        assert isinstance(caught.value.error("look"), ConfigError)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(LoginFailed, match="no token file"):
        tokens.read(str(file))
    assert tokens.read("") == []


def test_a_folder_as_token_file_keeps_nothing_open(tmp_path):
    """Red before: a descriptor for each login."""
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(LoginFailed, match="Is a directory"):
            tokens.read(str(tmp_path))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("form", [old, new])
def test_a_token_with_a_name_that_is_not_utf8_is_one_for_others(form):
    """Red before: a `TypeError` for the new form, no token file for the old one."""
    data = form((tokens.KIND, "caf~:1", b"i", b"p"), (tokens.KIND, "nn:1", b"i", b"p")).replace(b"~", b"\xe9")
    assert [token.fits("10.0.0.1", "nn", 1, "") for token in tokens.parse(data)] == [False, True]


@given(st.binary(max_size=120))
def test_any_bytes_are_tokens_or_an_error(data):
    for form in (b"HDTS\0", b"HDTS\1"):
        with contextlib.suppress(ValueError, Exception if form[4] else ValueError):
            tokens.parse(form + data)


def test_a_slow_cipher_is_told_once_with_what_mends_it(caplog, monkeypatch):
    monkeypatch.setattr(transfer, "_said", set())
    caplog.set_level(logging.WARNING)
    handshake = transfer.Handshake(Digest(b"a", b"b", "hdfs/0", login.QOPS), lambda: None)
    handshake._digest.cipher = "rc4"
    for _ in range(2):
        handshake._tell_slow()
    assert caplog.text.count("dfs.encrypt.data.transfer.cipher.suites = AES/CTR/NoPadding") == 1


# -- answers ---------------------------------------------------------------------------------------------------------

OFFERS = {
    "TOKEN": wire.RpcSasl.Auth(method="TOKEN", mechanism="DIGEST-MD5", server_id="default", challenge=b'nonce="a"'),
    "KERBEROS": wire.RpcSasl.Auth(method="KERBEROS", mechanism="GSSAPI", protocol="hdfs", server_id="localhost"),
    "SIMPLE": wire.RpcSasl.Auth(method="SIMPLE", mechanism=""),
}
SAID = st.builds(
    lambda state, names, token: wire.RpcSasl(state=state, auths=[OFFERS[name] for name in names], token=token),
    st.integers(0, 5),
    st.lists(st.sampled_from(sorted(OFFERS)), unique=True),
    st.binary(max_size=40),
)
HEADER = st.builds(
    wire.RpcResponseHeader,
    call_id=st.sampled_from([2**32 - 33, 1]),
    status=st.sampled_from([0, 0, 0, 1, 2, 7]),
    exception=st.sampled_from(["x.SaslException", "what\nis this", ""]),
    message=st.sampled_from(["no\n\tat x", ""]),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings of one that wants Kerberos."""
    folder = tmp_path_factory.mktemp("site")
    for name, key, value in [
        ("core-site.xml", "hadoop.security.authentication", "kerberos"),
        ("hdfs-site.xml", "dfs.namenode.kerberos.principal", "hdfs/localhost@X"),
    ]:
        rows = f"<property><name>{key}</name><value>{value}</value></property>"
        (folder / name).write_text(f"<configuration>{rows}</configuration>")
    return folder


@given(
    st.lists(st.tuples(HEADER, SAID), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=1)), max_size=2),
)
def test_any_answer_to_a_login_is_one_line(site, answers, changes):
    """Red before: a Java class of two lines was two lines."""
    left = iter(answers)

    def act(call: Call) -> object:
        if (answer := next(left, None)) is None:
            return False
        data = bytearray(frame(*answer)[4:])
        for place, byte in changes:
            data[place : place + 1] = byte
        call.connection.sendall(len(data).to_bytes(4, "big") + data)
        return True

    server = Server(act)
    (site / "tokens").write_bytes(new((tokens.KIND, f"127.0.0.1:{server.port}", b"\0\5alice\0\0", b"p")))
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HADOOP_CONF_DIR", str(site))
        patch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(site / "tokens"))
        patch.setenv("KRB5CCNAME", f"FILE:{site}/none")
        client = RpcClient([("127.0.0.1", server.port)], "a.Protocol", user="ann")
        try:
            with pytest.raises(BootseerError) as caught:
                client.call("delete", wire.DeleteRequest(src="/a", recursive=False), wire.Result, "look", deadline=0.2)
        finally:
            client.close()
            server.close()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 5
