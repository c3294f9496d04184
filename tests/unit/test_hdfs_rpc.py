"""Hadoop RPC against a server that answers what a test says: right, late, torn, hostile, or not at all."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.backends.cluster import HdfsBackend
from bootseer.errors import (
    BootseerError,
    ConfigError,
    DataError,
    FullError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.hdfs import namenode, nameservice, rpc
from bootseer.hdfs.errors import RemoteError, SaslRequired, remote, translate
from bootseer.hdfs.framing import frame
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.rpc import RpcClient
from bootseer.hdfs.shared import parse_answer
from support.fakenamenode import Call, Server, whole
from support.waits import together


@contextlib.contextmanager
def serving(act: Callable[[Call], object], port: int = 0) -> Iterator[tuple[Server, RpcClient]]:
    server = Server(act, port)
    channel = RpcClient([("127.0.0.1", server.port)], "a.Protocol", user="ann")
    try:
        yield server, channel
    finally:
        channel.close()
        server.close()


def ask(channel: RpcClient, *, deadline: float = 10.0) -> wire.Result:
    return channel.call(
        "delete", wire.DeleteRequest(src="/a", recursive=False), wire.Result, "delete /a", deadline=deadline
    )


def usable(channel: RpcClient) -> bool:
    """Whether the next call goes over a connection that there is."""
    return any(shared.usable() for shared in channel._shared.values())


def yes(call: Call) -> None:
    call.answer(wire.Result(result=True))


# -- frames -----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.integers(0, 2**31 - 1))
def test_any_bytes_are_an_answer_or_an_error(data, call_id):
    with contextlib.suppress(DataError, RemoteError, SaslRequired):
        bytes(parse_answer(data, call_id))


@given(st.data())
def test_a_changed_or_torn_answer_is_the_answer_or_an_error(data):
    call_id = data.draw(st.integers(1, 2**31 - 1))
    answer = frame(wire.RpcResponseHeader(call_id=call_id, status=0), wire.Result(result=True))[4:]
    assert bytes(parse_answer(answer, call_id)) == wire.Result(result=True).SerializeToString()
    cut = data.draw(st.integers(0, len(answer) - 1))
    with pytest.raises(DataError):
        parse_answer(answer[:cut], call_id)
    place, byte = data.draw(st.integers(0, len(answer) - 1)), data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError, RemoteError, SaslRequired):
        bytes(parse_answer(answer[:place] + bytes([byte]) + answer[place + 1 :], call_id))


def test_text_of_the_server_that_is_not_utf8_is_shown_all_the_same():
    data = frame(wire.RpcResponseHeader(call_id=1, status=1, exception="x.Odd~", message="caf~"))[4:]
    with pytest.raises(RemoteError) as caught:
        parse_answer(data.replace(b"~", b"\xe9"), 1)
    assert (caught.value.java, caught.value.text) == ("Odd\ufffd", "caf\ufffd")


def test_a_call_is_what_hadoop_expects(monkeypatch):
    with serving(yes) as (server, channel):
        assert ask(channel).result
        assert ask(channel).result
        assert len(server.connections) == 1
        (context,) = server.contexts
        assert (context.user.effective, context.user.HasField("real"), context.protocol) == ("ann", False, "a.Protocol")
        first, second = (call.header for call in server.calls)
        assert (first.rpc_kind, first.rpc_op, first.retry_count, len(first.client_id)) == (2, 0, 0, 16)
        assert (second.client_id, second.call_id) == (first.client_id, first.call_id + 1)
        assert server.calls[0].method == "delete"
        assert wire.DeleteRequest.FromString(server.calls[0].body).src == "/a"


# -- trouble ----------------------------------------------------------------------------------------------------------


def test_a_lost_answer_is_asked_for_again_under_the_same_ids(caplog):
    def act(call: Call) -> object:
        return yes(call) if len(server.calls) in (1, 4) else False

    with serving(act) as (server, channel):
        assert ask(channel).result
        assert ask(channel).result
        headers = [call.header for call in server.calls[1:]]
        assert [header.retry_count for header in headers] == [0, 1, 2]
        assert len({(header.client_id, header.call_id) for header in headers}) == 1
    assert [record.message.partition(" ")[2].partition("(")[0] for record in caplog.records] == [
        "does not answer ",
        "answers again",
    ]


def test_a_server_that_was_never_reached_makes_no_warning(caplog):
    with serving(lambda call: False if len(server.calls) < 3 else yes(call)) as (server, channel):
        assert ask(channel).result
    assert not caplog.records


@pytest.mark.parametrize("java", ["StandbyException", "RetriableException", "SafeModeException"])
def test_what_passes_is_waited_for_and_named_when_it_does_not(java):
    def act(call: Call) -> None:
        call.fail(f"org.apache.hadoop.ipc.{java}", "Name node is in trouble\n\tat java.base") if late() else yes(call)

    with serving(act) as (server, channel):
        late = lambda: len(server.calls) < 3  # noqa: E731
        assert ask(channel).result
        assert len(server.connections) == 1
        late = lambda: True  # noqa: E731
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=f"cannot delete /a on hdfs://.*: {java} Name node is in trouble"):
            ask(channel, deadline=0.5)
        assert time.monotonic() - began < 5


def test_pauses_grow_to_a_second_and_not_beyond():
    one = RpcClient([("h", 1)], "a.Protocol", user="ann")
    three = RpcClient([("h", 1), ("i", 1), ("j", 1)], "a.Protocol", name="hdfs://s", user="ann")
    assert 0.02 < one._pause(1) <= 0.05
    assert all(0.5 <= one._pause(attempt) <= 1.0 for attempt in (6, 100, 10**6))
    assert [three._pause(attempt) > 0 for attempt in range(1, 7)] == [False, False, True, False, False, True]


def test_a_server_that_never_answers_is_given_up_at_the_deadline():
    with serving(lambda call: None) as (server, channel):
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"cannot delete /a on hdfs://127.0.0.1:\d+: .*in time|timed out"):
            ask(channel, deadline=0.3)
        assert time.monotonic() - began < 5
        assert len(server.calls) == 1


def test_an_answer_in_drops_has_the_deadline_too():
    def act(call: Call) -> None:
        call.connection.sendall(struct.pack(">I", 1000))
        with contextlib.suppress(OSError):
            for _ in range(100):
                call.connection.sendall(b"x")
                time.sleep(0.05)

    with serving(act) as (_server, channel):
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            ask(channel, deadline=0.3)
        assert time.monotonic() - began < 3


def test_a_wrong_port_fails_soon_but_a_known_server_is_waited_for():
    with serving(yes) as (server, channel):
        port = server.port
        assert ask(channel).result
    other = RpcClient([("127.0.0.1", port)], "a.Protocol", user="ann")
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="connection refused"):
        ask(other, deadline=60.0)
    assert time.monotonic() - began < 20
    back: list[Server] = []
    timer = threading.Timer(0.5, lambda: back.append(Server(yes, port)))
    timer.start()
    try:
        assert ask(channel, deadline=60.0).result
    finally:
        timer.join()
        channel.close()
        back[0].close()


def test_a_name_without_address_is_one_line():
    with pytest.raises(UnavailableError, match=r"no-such-host\.invalid"):
        ask(RpcClient([("no-such-host.invalid", 1)], "a.Protocol", user="ann"), deadline=20.0)


def test_a_connection_closed_while_idle_is_not_an_error(caplog):
    with serving(yes) as (server, channel):
        assert ask(channel).result
        server.connections[0].shutdown(socket.SHUT_RDWR)
        assert ask(channel).result
        assert len(server.connections) == 2
    assert not caplog.records


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack(">I", 0),
        struct.pack(">I", 2**31),
        struct.pack(">I", 5) + b"\xff" * 5,
        struct.pack(">I", 3) + b"\x7fab",
        frame(wire.RpcResponseHeader(call_id=77, status=0), wire.Result(result=True)),
        frame(wire.RpcResponseHeader(call_id=1, status=0), wire.Result(result=True), wire.Empty()),
        frame(wire.RpcResponseHeader(call_id=1, status=0)),
    ],
)
def test_what_is_no_answer_is_an_error_at_once(data):
    with serving(lambda call: call.connection.sendall(data)) as (server, channel):
        with pytest.raises(DataError, match="is this the RPC port of a NameNode"):
            ask(channel)
        assert len(server.calls) == 1
        assert not usable(channel)


def test_a_fatal_error_ends_the_connection_and_is_not_tried_again():
    def act(call: Call) -> None:
        call.fail("org.apache.hadoop.security.authorize.AuthorizationException", "ann is not allowed here", status=2)

    with serving(act) as (server, channel):
        with pytest.raises(NotWritableError, match="ann is not allowed here") as caught:
            ask(channel)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert len(server.calls) == 1
        assert not usable(channel)


@pytest.mark.parametrize("way", ["refused", "negotiate"])
def test_who_wants_a_login_gets_one(way, monkeypatch):
    """Red before: it went through hdfs-native."""
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_TOKEN_FILE_LOCATION"):
        monkeypatch.delenv(name, raising=False)

    def act(call: Call) -> None:
        if way == "refused" and call.header.call_id >= 0:  # as Hadoop answers a client without SASL
            text = "SIMPLE authentication is not enabled.  Available:[TOKEN, KERBEROS]"
            header = wire.RpcResponseHeader(call_id=2**32 - 1, status=2, exception="x.AccessControlException")
            header.message = text
            call.connection.sendall(frame(header))
        else:
            auths = [wire.RpcSasl.Auth(method=method, mechanism="GSSAPI") for method in ("TOKEN", "KERBEROS")]
            header = wire.RpcResponseHeader(call_id=2**32 - 33, status=0)
            call.connection.sendall(frame(header, wire.RpcSasl(state=1, auths=auths)))

    with serving(act) as (server, channel):
        for _ in range(2):
            with pytest.raises(ConfigError, match="wants Kerberos, and HADOOP_CONF_DIR is not set"):
                ask(channel)
        assert server.logins == [False, True, True]  # once it is known, nothing is tried without


@pytest.mark.parametrize(
    ("java", "text"),
    [
        ("java.io.FileNotFoundException", "gone"),
        ("x.AccessControlException", "/a (is not a directory)"),
        ("x.AccessControlException", "a: ParentNotDirectoryException b"),
        ("x.FileAlreadyExistsException", "/a"),
        ("x.RetriableException", "FileNotFoundException"),
    ],
)
def test_what_is_said_before_the_login_is_not_about_files(java, text):
    """Red before: whoever answered at the NameNode's port could say that a file is not there."""
    with serving(lambda call: call.fail(java, text)) as (server, _):
        node = NameNode([("127.0.0.1", server.port)], "ann")
        node._rpc._secured = True
        with pytest.raises((UnavailableError, NotWritableError), match=r"refused the login|: RetriableException; "):
            node.info("/a", deadline=0.5)
        node.close()


@pytest.mark.parametrize(("method", "error"), [("KERBEROS", ConfigError), ("OTHER~", UnsupportedError)])
def test_names_in_an_offer_that_are_not_utf8_are_shown(method, error, tmp_path, monkeypatch):
    """Red before: a `TypeError`."""
    site(tmp_path, {"dfs.namenode.kerberos.principal": "hdfs/_HOST@SITE"})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))

    def act(call: Call) -> None:
        auth = wire.RpcSasl.Auth(method=method, mechanism="x", protocol="hdfs", server_id="caf~")
        answer = frame(wire.RpcResponseHeader(call_id=2**32 - 33, status=0), wire.RpcSasl(state=1, auths=[auth]))
        call.connection.sendall(answer.replace(b"~", b"\xe9"))

    with serving(act) as (_, channel):
        channel._secured = True
        with pytest.raises(error, match="\ufffd"):
            ask(channel)


def test_a_login_waits_for_none_at_another_namenode(monkeypatch):
    """Red before: it waited until the frozen one's deadline."""
    frozen, reached = threading.Event(), threading.Event()

    def log_in(connection: rpc.Connection, identity: object) -> str:
        if connection.address == first:
            reached.set()
            frozen.wait(10)
        return ""

    monkeypatch.setattr(rpc.negotiation, "log_in", log_in)
    with serving(yes) as (one, _), serving(yes) as (other, _):
        first, second = (("127.0.0.1", server.port) for server in (one, other))
        channel = RpcClient([first, second], "a.Protocol", user="ann")
        channel._secured = True
        thread = threading.Thread(target=channel._connected, args=(first, time.monotonic() + 10))
        thread.start()
        reached.wait(10)
        try:
            assert channel._connected(second, time.monotonic() + 1).usable()
        finally:
            frozen.set()
            thread.join()
            channel.close()


def test_a_login_that_hangs_holds_calls_up_no_longer_than_one_needs(monkeypatch):
    """Red before: as long as the call may last that makes it, a minute where files are written."""
    tried = list[object]()

    def log_in(connection: rpc.Connection, identity: object) -> str:
        tried.append(connection)
        connection.send(b"hrpc\x09\x00\xdf")
        if len(tried) == 1:
            connection.some(1)  # nothing comes
        return ""

    monkeypatch.setattr(rpc.negotiation, "log_in", log_in)
    monkeypatch.setattr(rpc, "_CONNECT", 0.2)
    with serving(yes) as (_, channel):
        channel._secured = True
        thread = threading.Thread(target=ask, args=(channel,), kwargs={"deadline": 30.0})
        thread.start()
        while not tried:
            time.sleep(0.001)
        assert ask(channel, deadline=5.0).result
        thread.join(10)


def test_the_key_of_transfers_is_waited_for_as_long_as_its_reader_waits(monkeypatch):
    node, given = NameNode([("127.0.0.1", 1)], "ann"), []
    found = SimpleNamespace(key=wire.DataKey(id=1))
    monkeypatch.setattr(node, "_call", lambda *arguments: given.append(arguments[-1]) or found)
    node._defaults = 0.0, SimpleNamespace(encrypt_data_transfer=True)
    for left in (0.5, 1000.0):
        assert node._data_key(time.monotonic() + left) is found.key
    assert 0 < given[0] <= 0.5
    assert given[1] == namenode.DEADLINE


def test_a_refusal_before_the_request_was_read_is_seen():
    """Hadoop answers a client without SASL after its first 7 bytes, and closes: the rest is answered by a reset."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(2 * 20):  # without a login, then with one
                with listening.accept()[0] as connection:
                    whole(connection, 7)
                    header = wire.RpcResponseHeader(call_id=2**32 - 1, status=2, exception="x.AccessControlException")
                    header.message = "SIMPLE authentication is not enabled.  Available:[KERBEROS]"
                    connection.sendall(frame(header))

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in range(20):
            with pytest.raises(NotWritableError, match="KERBEROS"):
                ask(RpcClient([listening.getsockname()[:2]], "a.Protocol", user="ann"))
        thread.join(10)


def test_many_threads_share_one_connection():
    """Red before: up to eight, each with a login."""

    def act(call: Call) -> None:
        number = int(wire.DeleteRequest.FromString(call.body).src)
        later = threading.Timer(number % 3 * 0.002, answer, (call, number))  # in another order
        later.start()
        laters.append(later)

    def answer(call: Call, number: int) -> None:
        with sending:
            call.answer(wire.RecoverLeaseRequest(src=str(number), client=""))

    def work(start: int) -> None:
        for number in range(start, start + 20):
            request = wire.DeleteRequest(src=str(number), recursive=False)
            found = channel.call("delete", request, wire.RecoverLeaseRequest, "try", deadline=30.0)
            assert found.src == str(number)

    sending, laters = threading.Lock(), list[threading.Timer]()
    with serving(act) as (server, channel):
        together(work, range(0, 2000, 100))
        assert len(server.connections) == 1
        assert len({call.header.call_id for call in server.calls}) == len(server.calls) == 400
        for later in laters:
            later.join()


def answered(number: int) -> bytes:
    return frame(wire.RpcResponseHeader(call_id=number, status=0), wire.Result(result=True))


@pytest.mark.parametrize("came", [0, 2, 9, -1], ids=["nothing", "a-length", "a-part", "all-but-a-byte"])
@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_call_that_is_late_leaves_the_connection_as_it_is(came, whose):
    """Whoever reads for all may have received a part of any answer by the end of its time."""

    def act(call: Call) -> object:
        if len(server.calls) == 1:
            first.append(call)
            return None
        send = call.connection.sendall
        if len(server.calls) == 2:
            mine, other = answered(first[0].header.call_id), answered(call.header.call_id)
            begun, rest = (mine, other) if whose == "its own" else (other, mine)
            send(begun[:came])
            late.wait(10)
            return send(begun[came:] + rest)
        return yes(call)

    first, late = list[Call](), threading.Event()
    with serving(act) as (server, channel):
        results: list[object] = []

        def second() -> None:
            while not first:
                time.sleep(0.001)
            results.append(ask(channel).result)

        thread = threading.Thread(target=second)
        thread.start()
        with pytest.raises(UnavailableError, match="in time"):
            ask(channel, deadline=0.3)
        late.set()
        thread.join(10)
        assert results == [True]
        assert ask(channel).result
        assert [len(server.connections), len(server.calls)] == [1 if came else 2, 3]


def test_a_call_that_was_late_more_than_once_is_answered_as_often_and_nobody_minds(monkeypatch):
    """Of a name service each NameNode is asked in turn, one that is slow again and again. Red before: the second
    answer was an error of whoever read it."""

    def act(call: Call) -> object:
        answer = answered(call.header.call_id)
        if call.header.call_id == 1:
            number = len(late)
            late.append(answer)
            return call.connection.sendall(late[0][number : number + 1])
        return call.connection.sendall(late[0][len(late) :] + b"".join(late[1:]) + answer)

    late = list[bytes]()
    monkeypatch.setattr(rpc, "_SHORTEST", 0.05)
    with serving(act) as (server, channel), serving(lambda call: call.fail("x.StandbyException")) as (standby, _):
        channel = RpcClient([("127.0.0.1", each.port) for each in (server, standby)], "a.Protocol", user="ann")
        with pytest.raises(UnavailableError):
            ask(channel, deadline=0.5)
        assert len(late) > 1
        assert ask(channel).result
        assert len(server.connections) == 1
        channel.close()


def test_no_call_is_made_over_a_connection_that_was_silent_for_the_time_of_a_call():
    """Whatever is between here and the NameNode takes what is sent, and has lost the connection. Red before: every
    later call was late, too."""

    def act(call: Call) -> object:
        return None if call.connection is server.connections[0] else yes(call)

    with serving(act) as (server, channel):
        with pytest.raises(UnavailableError, match="in time"):
            ask(channel, deadline=0.2)
        assert ask(channel, deadline=5.0).result
        assert len(server.connections) == 2


@pytest.mark.parametrize("how", ["closed", "nonsense", "torn"])
def test_calls_of_a_connection_that_ends_are_made_again_under_their_ids(how):
    def act(call: Call) -> object:
        if len(server.calls) > 3:
            return yes(call)
        if len(server.calls) < 3:
            return None
        if how == "nonsense":
            return call.connection.sendall(answered(4711))
        if how == "torn":
            call.connection.sendall(answered(call.header.call_id)[:7])
        return False

    with serving(act) as (server, channel):
        results: list[object] = []

        def one(_: int) -> None:
            with contextlib.suppress(DataError):  # of who has read the nonsense
                results.append(ask(channel).result)

        together(one, range(3))
        read = how != "nonsense"
        assert results == [True] * (2 + read)
        assert len(server.connections) == 2
        ids = [call.header.call_id for call in server.calls]
        assert set(ids[3:]) <= set(ids[:3])
        assert len(ids) == 5 + read


def test_a_call_that_cannot_be_sent_has_its_deadline_and_ends_the_connection():
    """The other side does not read: half of a call must not be taken for the beginning of the next one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        channel = RpcClient([listening.getsockname()[:2]], "a.Protocol", user="ann")
        request = wire.DeleteRequest(src="a" * (16 << 20), recursive=False)
        with pytest.raises(UnavailableError, match="in time"):
            channel.call("delete", request, wire.Result, "try", deadline=0.3)
        assert not usable(channel)


def test_a_forked_child_is_another_client():
    with serving(yes) as (server, channel):
        assert ask(channel).result
        node = NameNode([("127.0.0.1", server.port)], "ann")
        name = node.client_name
        with channel._lock:  # as if another thread of the parent were just at it
            if not (child := os.fork()):
                try:
                    os._exit(0 if ask(channel).result and node.client_name != name else 1)
                except BaseException:
                    os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ask(channel).result
        assert node.client_name == name
        ids = [call.header.client_id for call in server.calls]
        assert ids[0] == ids[2] != ids[1]


ONE_CALL = """
import sys
from bootseer.hdfs.namenode import NameNode
node = NameNode([("127.0.0.1", int(sys.argv[1]))], "ann")
node.mkdirs("/a")
"""


def test_a_process_ends_without_a_word_about_open_connections():
    with serving(yes) as (server, _):
        command = [sys.executable, "-X", "dev", "-c", ONE_CALL, str(server.port)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_there_is_one_namenode_object_for_a_name_service(monkeypatch):
    monkeypatch.setattr(nameservice, "addresses", lambda service: (("127.0.0.1", 1),))
    monkeypatch.setattr(namenode, "_known", {})
    first = NameNode.connect("hdfs://service/b")
    assert first is NameNode.connect("hdfs://service/a")
    for name in ("KRB5CCNAME", "KRB5_CONFIG", "KRB5_CLIENT_KTNAME", "HADOOP_TOKEN_FILE_LOCATION", "HADOOP_HOME"):
        with monkeypatch.context() as changed:  # somebody else
            changed.setenv(name, "/another")
            assert NameNode.connect("hdfs://service/a") is not first


# -- errors, names, users ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("java", "text", "error", "shown"),
    [
        ("java.io.FileNotFoundException", "File does not exist: /a", NotFoundError, "no such file or folder"),
        ("java.io.FileNotFoundException", "Path is not a file: /a", NotFoundError, "it is a folder"),
        ("x.AccessControlException", "Permission denied: user=ann", NotWritableError, "Permission denied: user=ann"),
        ("x.DSQuotaExceededException", "The DiskSpace quota of /a is exceeded", FullError, "quota"),
        ("x.NSQuotaExceededException", "The NameSpace quota", FullError, "quota"),
        ("x.LeaseExpiredException", "File does not exist: /a (inode 5)", NotWritableError, "another writer"),
        ("x.FileAlreadyExistsException", "/a already exists", FileExistsError, "already exists"),
        ("x.AlreadyBeingCreatedException", "because bob is writing it", FileExistsError, "bob"),
        ("x.RpcNoSuchProtocolException", "Unknown protocol: y", ConfigError, "RPC port"),
        ("java.io.IOException", "File /a could only be written to 0 of the 1 minReplication", UnavailableError, "few"),
        ("x.ParentNotDirectoryException", "/a (is not a directory)", NotWritableError, "in the way"),
        ("x.UnknownCryptoProtocolVersionException", "No crypto", UnsupportedError, "No crypto"),
        ("x.AuthorizationException", "a is not allowed to impersonate b", NotWritableError, "hadoop.proxyuser"),
        ("x.AuthorizationException", "Unauthorized connection for super-user: a", NotWritableError, "proxyuser"),
        ("x.AuthorizationException", "a is not authorized for protocol X", NotWritableError, "hadoop-policy.xml"),
        ("java.lang.NullPointerException", "", BootseerError, "NullPointerException"),
        ("org.apache.hadoop.ipc.Server$Strange", "line\n\tat java.base", BootseerError, "Strange line"),
    ],
)
def test_server_exceptions_are_one_line(java, text, error, shown):
    found = remote(RemoteError(java, text), "touch /a on hdfs://n:1")
    assert type(found) is error
    assert shown in str(found)
    assert str(found).startswith("cannot touch /a on hdfs://n:1: ")
    assert "\n" not in str(found)


SPOKEN = [
    "SafeMode",
    "Standby x",
    "Quota exceeded, out of space",
    "AccessControl",
    "checksum",
    "NoSuchProtocol",
    "SASL",
]


@pytest.mark.parametrize("name", SPOKEN)
def test_the_name_of_a_file_says_nothing_about_the_error(name):
    path = f"/models/{name}/x"
    doing = f"read {path} on hdfs://n:1"
    found = remote(RemoteError("java.io.FileNotFoundException", f"File does not exist: {path}"), doing)
    assert type(found) is NotFoundError
    assert type(translate(FileNotFoundError(f"File does not exist: {path}"), doing)) is NotFoundError
    native = RuntimeError(f'RPCError("java.io.FileNotFoundException", "File does not exist: {path}\\n\\tat x")')
    assert type(translate(native, doing)) is NotFoundError
    found = remote(RemoteError("x.AccessControlException", f'Permission denied: inode="{path}"'), doing)
    assert type(found) is NotWritableError
    text = f"File {path} could only be written to 0 of the 1 minReplication nodes"
    for plain in (remote(RemoteError("java.io.IOException", text), doing), translate(OSError(text), doing)):
        assert type(plain) is UnavailableError
        assert "too few DataNodes" in str(plain)
    assert type(remote(RemoteError("java.lang.NullPointerException", path), doing)) is BootseerError


@pytest.mark.parametrize(
    ("native", "error", "shown"),
    [
        ('FatalRPCError("x.RpcNoSuchProtocolException", "Unknown protocol: y")', ConfigError, "RPC port"),
        ('FatalRPCError("x.AuthorizationException", "bob is not allowed")', NotWritableError, "bob is not allowed"),
        ('RPCError("x.RetriableException", "x.SafeModeException: Cannot create /a.")', UnavailableError, "safe mode"),
        ('RPCError("x.StandbyException", "not in state standby")', UnavailableError, "no active NameNode"),
        ('UnsupportedErasureCodingPolicy("X")', UnsupportedError, "X"),
        ("ChecksumError", DataError, "every replica"),
        ('DataTransferError("checksum differs")', DataError, "every replica"),
        ('DataTransferError("it broke off")', UnavailableError, "check that"),
        ('IOError(Custom { kind: Other, error: "/a" })', UnavailableError, "check that"),
        ('BlocksNotFound("/checksum")', UnavailableError, "check that"),
        ('InvalidPath("/SafeMode")', ConfigError, "InvalidPath"),
    ],
)
def test_errors_of_hdfs_native_are_one_line(native, error, shown):
    found = translate(RuntimeError(native), "read /a on hdfs://n:1")
    assert type(found) is error
    assert shown in str(found)
    assert '")' not in str(found)


def test_who_we_are(monkeypatch):
    monkeypatch.delenv("HADOOP_USER_NAME", raising=False)
    monkeypatch.delenv("HADOOP_PROXY_USER", raising=False)
    assert namenode.login_user()[0]
    monkeypatch.setattr(os, "geteuid", lambda: 2**31 - 7)
    with pytest.raises(ConfigError, match="HADOOP_USER_NAME"):
        namenode.login_user()
    monkeypatch.setenv("HADOOP_USER_NAME", "bob")
    assert namenode.login_user() == ("bob", "")
    bob = NameNode.connect("hdfs://h:1/x")
    assert NameNode.connect("hdfs://h:1/y") is bob
    assert bob.user == "bob"
    monkeypatch.setenv("HADOOP_PROXY_USER", "eve")
    assert namenode.login_user() == ("eve", "bob")
    assert NameNode.connect("hdfs://h:1") is not bob


@pytest.mark.parametrize("url", ["file:///a", "hdfs://h:port/a", "/a"])
def test_urls_of_other_things_are_refused(url):
    with pytest.raises(ConfigError):
        NameNode.connect(url)


# -- name services ----------------------------------------------------------------------------------------------------


def site(folder: Path, values: dict[str, str]) -> None:
    rows = "".join(f"<property><name>{key}</name><value> {value} </value></property>" for key, value in values.items())
    (folder / "hdfs-site.xml").write_text(f"<configuration>{rows}</configuration>")


def test_the_namenodes_of_a_name_service_come_from_the_sites_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    key = "dfs.namenode.rpc-address"
    values = {"dfs.ha.namenodes.One": "a, b", f"{key}.One.a": "h1:8021", f"{key}.One.b": "h2", f"{key}.two": "[::1]:9"}
    site(tmp_path, values)
    assert nameservice.addresses("One") == (("h1", 8021), ("h2", 8020))
    assert nameservice.addresses("two") == (("::1", 9),)
    assert NameNode.connect("hdfs://One/x").url == "hdfs://One"
    with pytest.raises(ConfigError, match=r"does not set dfs\.namenode\.rpc-address\.one"):
        nameservice.addresses("one")
    for text in ("${x}:1", "h1:x"):
        site(tmp_path, {**values, f"{key}.One.b": text})
        with pytest.raises(ConfigError, match=r"One\.b"):
            nameservice.addresses("One")
    (tmp_path / "hdfs-site.xml").write_text("<configuration>")
    with pytest.raises(ConfigError, match=r"hdfs-site\.xml"):
        nameservice.addresses("One")


def test_settings_may_lie_in_included_files_and_refer_to_others(tmp_path, monkeypatch):
    """Red before: what an included file says, such as how transfers are protected, was as if nobody had said it; and
    what counts only where it is gone took its place."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    site(
        tmp_path, {"dfs.x.protection": "${of.all}", "of.all": "priv${of.half}", "of.half": "acy", "odd": "${odd}${no}"}
    )
    (tmp_path / "hdfs-site.xml").rename(tmp_path / "shared.xml")
    begin = '<configuration xmlns:xi="http://www.w3.org/2001/XInclude">'
    main, include = tmp_path / "hdfs-site.xml", '<xi:include href="shared.xml"/>'
    else_ = "<xi:fallback><property><name>{}</name><value>else</value></property></xi:fallback></xi:include>"
    gone = f"<xi:include href='gone.xml'>{else_.format('of.gone')}"
    main.write_text(f"{begin}{include[:-2]}>{else_.format('dfs.x.protection')}{gone}</configuration>")
    assert (nameservice.setting("dfs.x.protection"), nameservice.setting("odd")) == ("privacy", "${odd}${no}")
    assert nameservice.setting("of.gone") == "else"
    for href, said in (("gone.xml", r"No such file .*gone\.xml"), ("hdfs-site.xml", "Too many levels")):
        other = tmp_path / f"with-{href}"  # a folder is read once
        other.mkdir()
        (other / "hdfs-site.xml").write_text(f"{begin}<xi:include href='{href}'/></configuration>")
        monkeypatch.setenv("HADOOP_CONF_DIR", str(other))
        with pytest.raises(ConfigError, match=said):
            nameservice.setting("dfs.x.protection")


def _is(name: str, value: str, more: str = "") -> str:
    return f"<property><name>{name}</name><value>{value}</value>{more}</property>"


@pytest.mark.parametrize(
    ("core", "more", "asked", "expected"),
    [
        (_is("fs.defaultFS", "hdfs://one/user"), "", "fs", "hdfs://one"),
        (_is("fs.defaultFS", "hdfs://h:8021/"), "", "fs", "hdfs://h:8021"),
        (_is("fs.default.name", "hdfs://one"), "", "fs", "hdfs://one"),  # its name before Hadoop 2
        (_is("fs.defaultFS", "hdfs://a") + _is("fs.default.name", "hdfs://one"), "", "fs", "hdfs://one"),
        ('<property name="fs.defaultFS" value="hdfs://one"/>', "", "fs", "hdfs://one"),
        (_is("fs.defaultFS", "hdfs://${at}"), _is("at", "one"), "fs", "hdfs://one"),
        (_is("x", "1", "<final>true</final>"), _is("x", "2"), "x", "1"),
        (_is("x", "1", "<final>false</final>"), _is("x", "2"), "x", "2"),
        (_is("x", "1", "<final> true </final>") + _is("x", "2"), "", "x", "2"),  # as Hadoop 3.4.2 has it
        (_is("x", "1", "<final>TRUE</final>") + _is("x", "2"), "", "x", "2"),
        ('<property name="x" value="1" final="true"/>', _is("x", "2"), "x", "1"),
        (_is("x", "1") + _is("x", "2"), "", "x", "2"),
        (_is("x", "1"), _is("x", ""), "x", "1"),  # nothing is no value
        (_is("x", "1"), "<property><name>x</name></property>", "x", "1"),
        (_is("x", ""), "", "x", ""),
        (_is("x", "<!-- 0 -->1"), "", "x", "1"),
        (_is("x", "<![CDATA[1]]>"), "", "x", "1"),
        (f"<configuration>{_is('x', '1')}</configuration>", "", "x", "1"),
        (_is("x", "1") + "<property><value>2</value></property><property/>", "", "x", "1"),
        ("", _is("dfs.namenode.rpc-address.one", "hdfs://h1:8021"), "at", (("h1", 8021),)),
        ("", _is("dfs.namenode.rpc-address.one", "hdfs://[::1]"), "at", (("::1", 8020),)),
        ("", _is("dfs.namenode.rpc-address.one", "h1"), "at", (("h1", 8020),)),
        (
            _is("dfs.ha.namenodes.one", "a,\n b,"),
            _is("dfs.namenode.rpc-address.one.a", "h1:1") + _is("dfs.namenode.rpc-address.one.b", "h2:2"),
            "at",
            (("h1", 1), ("h2", 2)),
        ),
        (  # an observer is a NameNode of the service like others
            _is("dfs.client.failover.proxy.provider.one", "x.ObserverReadProxyProvider"),
            _is("dfs.ha.namenodes.one", "a") + _is("dfs.namenode.rpc-address.one.a", "h1:1"),
            "at",
            (("h1", 1),),
        ),
        (  # a router stands for name services
            _is("dfs.nameservices", "one,two"),
            _is("dfs.ha.namenodes.one", "r1") + _is("dfs.namenode.rpc-address.one.r1", "router:8888"),
            "at",
            (("router", 8888),),
        ),
        (
            "",
            _is("dfs.namenode.rpc-address.one", "127.0.0.1:1") + _is("dfs.client.failover.resolve-needed.one", "TRUE"),
            "machines",
            (("127.0.0.1", 1),),
        ),
        (_is("dfs.client.use.datanode.hostname", "True"), "", "names", True),
        ("", _is("dfs.client.use.datanode.hostname", "yes"), "names", False),
    ],
)
def test_settings_are_read_as_hadoop_reads_them(tmp_path, monkeypatch, core, more, asked, expected):
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    for name, text in (("core", core), ("hdfs", more)):
        (tmp_path / f"{name}-site.xml").write_text(f"<configuration>{text}</configuration>")
    looked: list[str] = []

    def machines(host: str, port: int, until: float) -> list[tuple[str, int]]:
        looked.append(host)
        return [(host, port)]

    monkeypatch.setattr(nameservice, "machines", machines)
    if asked == "fs":
        assert nameservice.split("hdfs:///b") == (expected, "/b")
    elif asked in ("at", "machines"):
        assert nameservice.addresses("one") == expected
        assert bool(looked) is (asked == "machines")
    else:
        assert (nameservice.by_hostname() if asked == "names" else nameservice.setting(asked)) == expected


def test_a_name_service_may_be_one_name_of_several_machines(tmp_path, monkeypatch):
    """Red before: it was left to hdfs-native."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    named, real = "dfs.namenode.rpc-address.one", socket.getaddrinfo

    def look(host: str, *args: object, **kwargs: object) -> object:
        if host != "all.site" or kwargs.get("flags"):
            return real(host, *args, **kwargs)  # type: ignore[arg-type]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", 8021)) for n in (1, 251)]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(socket, "getnameinfo", lambda at, flags: ("nn1.site" if at[0][-2:] == ".1" else at[0], ""))
    for address, found in (("all.site:8021", (("nn1.site", 8021), ("127.0.0.251", 8021))), ("none.invalid:1", None)):
        site(tmp_path, {named: address, "dfs.client.failover.resolve-needed.one": "true"})
        if found:
            assert nameservice.addresses("one") == found
            continue
        with pytest.raises(UnavailableError, match="cannot look up the NameNodes of name service one"):
            nameservice.addresses("one")


def test_a_name_service_that_nothing_tells_of_is_one_line(monkeypatch):
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(ConfigError, match="name service unknown, and HADOOP_CONF_DIR is not set"):
        HdfsBackend("hdfs://unknown/a").stat("b")


@pytest.mark.parametrize("first", ["standby", "gone", "frozen"])
def test_calls_go_to_the_active_namenode(first, caplog):
    def passive(call: Call) -> None:
        if first == "standby":
            call.fail("org.apache.hadoop.ipc.StandbyException", "Operation category READ is not supported")

    with serving(passive) as (standby, _), serving(yes) as (active, _):
        if first == "gone":
            standby.close()
        ports = standby.port, active.port
        channel = RpcClient([("127.0.0.1", port) for port in ports], "a.Protocol", name="hdfs://s", user="ann")
        assert ask(channel, deadline=6.0).result
        assert ask(channel, deadline=6.0).result
        assert len(active.calls) == 2
        assert len(standby.calls) == (first != "gone")
        tried = [call.header for call in (*standby.calls, *active.calls)][-3:-1]
        assert len({(header.client_id, header.call_id) for header in tried}) == 1
        assert not caplog.records  # that one of two is in standby is no trouble
        channel.close()


@pytest.mark.parametrize("silent", [True, False])
def test_without_an_active_namenode_the_deadline_ends_it_and_what_was_said_is_told(silent):
    def passive(call: Call) -> None:
        call.fail("org.apache.hadoop.ipc.StandbyException", "Operation category READ is not supported")

    with serving(passive) as (one, _), serving((lambda call: None) if silent else passive) as (two, _):
        addresses = [("127.0.0.1", one.port), ("127.0.0.1", two.port)]
        channel = RpcClient(addresses, "a.Protocol", name="hdfs://s", user="ann")
        with pytest.raises(UnavailableError, match=r"cannot delete /a on hdfs://s: Standby.*no active NameNode"):
            ask(channel, deadline=0.5)
        assert one.calls
        assert two.calls
        channel.close()


@contextlib.contextmanager
def listing(remaining: int, **entry: object) -> Iterator[tuple[NameNode, Server]]:
    """A NameNode whose folders have one entry, and so many more."""

    def act(call: Call) -> None:
        mode = wire.Permission(mode=0)
        found = wire.FileStatus(kind=2, owner="", group="", mtime=0, atime=0, permission=mode, **entry)  # type: ignore[arg-type]
        call.answer(wire.GetListingResponse(listing=wire.DirectoryListing(entries=[found], remaining=remaining)))

    with serving(act) as (server, _):
        node = NameNode([("127.0.0.1", server.port)], "ann")
        yield node, server
        node.close()


def test_a_listing_without_end_is_an_error():
    with listing(1, path=b"a", length=0) as (node, server):
        with pytest.raises(DataError, match="without end"):
            node.list("/f")
        assert len(server.calls) == 2


def test_names_that_are_not_utf8_are_listed_but_cannot_be_asked_for():
    with listing(0, path=b"a\xff", length=3, file_id=9) as (node, _):
        (found,) = node.list("/f")
        assert (os.fsencode(found.path), found.size, found.file_id) == (b"/f/a\xff", 3, 9)
        with pytest.raises(ConfigError, match="not UTF-8"):
            node.info(found.path)


@pytest.mark.parametrize(
    ("java", "text", "open_"),
    [
        (
            "protocol.AlreadyBeingCreatedException",
            "because this file lease is currently owned by other on 10.0.0.1",
            True,
        ),
        (
            "protocol.AlreadyBeingCreatedException",
            "because client is already the current lease holder.",
            True,
        ),  # oneself
        ("FileAlreadyExistsException", "/a for client 10.0.0.1 already exists", False),
    ],
)
def test_a_file_that_somebody_writes_is_open_also_when_that_is_this_process(monkeypatch, java, text, open_):
    def create(self: HdfsBackend, path: str) -> None:
        said = f"failed to CREATE_FILE /a for client 10.0.0.1 {text}"
        raise remote(RemoteError(f"org.apache.hadoop.{java}", said), "create /a on hdfs://n:1")

    monkeypatch.setattr(HdfsBackend, "create", create)
    assert HdfsBackend("hdfs://n:1").writers.has_open("a") is open_
