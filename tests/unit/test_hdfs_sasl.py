"""Logins at daemons of HDFS: DIGEST-MD5 and its ciphers against bytes that Hadoop sent, token files, and what lies."""

import base64
import contextlib
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError, NotFoundError, UnsupportedError
from bootseer.hdfs import nameservice
from bootseer.hdfs.framing import delimited
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.sasl import digest, login, tokens, transfer
from bootseer.hdfs.sasl.digest import Digest
from bootseer.hdfs.sasl.login import LoginFailed
from bootseer.hdfs.sasl.streams import Aes, Framed
from bootseer.hdfs.sasl.transfer import Guard, KeyRefused, TokenRefused

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
    handshake = Guard(lambda: True, lambda anew: None).handshake(9866, token)
    assert handshake.begin() + handshake.answer(told["challenge"]) == told["begin"] + told["response"]
    assert handshake.answer(told["proof"]) == b""
    assert type(handshake.stream) is {"authentication": type(None), "privacy-aes": Aes}.get(name, Framed)
    stream = handshake.stream
    if stream is not None:
        assert b"".join(stream.out([told["request"]])) == told["sealed request"]
        assert b"".join(stream.plain(bytes([byte])) for byte in told["sealed answer"]) == told["answer"]
    changed = bytearray(told["proof"])
    changed[20] ^= 1
    other = Guard(lambda: True, lambda anew: None).handshake(9866, token)
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
    secured = Guard(lambda: True, lambda anew: None)
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert transfer.OPEN.handshake(9866, token) is None
    assert secured.handshake(9866, token)
    assert secured.handshake(1004, token) is None  # root's port
    for number, value in enumerate(("", "privacy")):
        (folder := tmp_path / str(number)).mkdir()
        rows = f"<property><name>dfs.data.transfer.protection</name><value>{value}</value></property>"
        (folder / "hdfs-site.xml").write_text(f"<configuration>{rows}</configuration>")
        monkeypatch.setenv("HADOOP_CONF_DIR", str(folder))
        assert nameservice.setting("dfs.data.transfer.protection") == value
        assert bool(secured.handshake(9866, token)) == bool(value)
        assert transfer.is_slow() == bool(value)
    asked: list[bool] = []
    key = wire.DataKey(id=1, pool="p", nonce=b"n", key=b"k", expires=0)
    encrypting = Guard(lambda: False, lambda anew: asked.append(anew) or key)
    handshake = encrypting.handshake(1004, token)
    with pytest.raises(KeyRefused):
        handshake.answer(wire.TransferSasl(status=1).SerializeToString())
    encrypting.handshake(1004, token)
    assert asked == [False, True]


def test_what_a_site_allows():
    assert login.qops("") == ["auth", "auth-int", "auth-conf"]
    assert login.qops("authentication") == ["auth", "auth-int", "auth-conf"]
    assert login.qops("privacy") == ["auth-conf"]
    assert login.qops("Integrity, authentication") == ["auth-int", "auth", "auth-conf"]
    with pytest.raises(LoginFailed, match="offers auth, and the site wants auth-conf") as caught:
        Digest(b"a", b"b", "hdfs/0", login.qops("privacy")).answer(b'nonce="a",qop="auth"')
    assert isinstance(caught.value.error("read"), UnsupportedError)


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
    assert isinstance(caught.value.error("look"), NotFoundError)
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
