"""Who may connect: keys, the files of running servers, and what a listener learns that is no server."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from gt import server
from gt.cli import main as cli
from gt.client.session import Session
from gt.dispatcher.server import Server
from gt.errors import DispatcherLost, Refused
from gt.wire.access import approach, auth, server_files
from gt.wire.access.auth import CURVE, NULL, PLAIN, Access, AccessEntry
from gt.wire.dealer import Dealer, LinkTimeouts
from gt.wire.link import hello
from gt.wire.messages import Reject
from gt.wire.socket import host_and_port
from gt.worker import __main__ as worker
from tests.helpers import zmtp
from tests.helpers.limits import limit
from tests.helpers.processes import free_ports
from tests.helpers.toy_core import ToyCore

LOCAL, AWAY = "127.0.0.1", "10.1.2.3"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The user's runtime directory, for this test alone."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "gt"


class Running:
    """A server with a toy core in a thread."""

    def __init__(self, access: Access | None = None, port: int = 0, host: str = LOCAL) -> None:
        self.server = Server(host, port, access, core=ToyCore())
        self.port, self.address = self.server.port, self.server.address
        self._thread = threading.Thread(target=self.server.run, name="gt-test-server")
        self._thread.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self._thread.join()


# ---- which mechanism, and what is shown


@pytest.mark.parametrize(
    ("access", "ip", "mechanism"),
    [
        (Access(), LOCAL, PLAIN),
        (Access("t" * 30), LOCAL, PLAIN),
        (Access("t" * 30), AWAY, CURVE),
        (Access("t" * 30), "0.0.0.0", CURVE),
        (Access("t" * 30, insecure=True), AWAY, CURVE),
        (Access(insecure=True), AWAY, NULL),
        (Access(insecure=True), LOCAL, PLAIN),
        (Access(encrypt=True), LOCAL, CURVE),
    ],
)
def test_a_server_asks_for_what_its_address_needs(access, ip, mechanism):
    found = auth.entry(access, ip)
    assert found.mechanism == mechanism and found.given == bool(access.token)
    assert access.token not in found.text() or not access.token  # the file never has what people gave


def test_a_server_off_loopback_without_a_token_is_refused():
    for ip in (AWAY, "0.0.0.0", "192.168.0.1"):
        with pytest.raises(Refused, match=r"needs a token.*gt key FILE.*--insecure"):
            auth.entry(Access(), ip)


def test_a_servers_own_secret_is_no_token_for_people():
    with pytest.raises(Refused, match="another server's own"):
        auth.entry(Access(auth.made()), LOCAL)


def test_a_password_opens_one_server_at_one_address():
    found = auth.entry(Access("people's token"), LOCAL)
    lock = auth.lock(found, "people's token", LOCAL, 5)
    shown = auth.key(found, "people's token", LOCAL, 5)
    assert auth.opens(lock, PLAIN, [b"gt", shown.password])
    others = [
        auth.key(found, "people's token", "127.0.0.2", 5),
        auth.key(found, "people's token", LOCAL, 6),
        auth.key(found, "another token", LOCAL, 5),
        auth.key(auth.entry(Access("people's token"), LOCAL), "people's token", LOCAL, 5),  # the server, started again
    ]
    assert not any(auth.opens(lock, PLAIN, [b"gt", other.password]) for other in others)
    for mechanism, credentials in ((NULL, []), (PLAIN, [shown.password]), (CURVE, [b""])):
        assert not auth.opens(lock, mechanism, credentials)
    for secret in (b"people's token", found.secret.encode()):
        assert secret not in shown.password


def test_both_sides_derive_the_same_keys():
    server, client = auth.lock(auth.entry(Access("t"), AWAY), "t", AWAY, 5), auth.key(None, "t", AWAY, 5)
    assert client == server and client.mechanism == CURVE and client.server != client.client
    assert auth.opens(server, CURVE, [b"public"], b"public") and not auth.opens(server, CURVE, [b"other"], b"public")
    assert auth.key(None, "u", AWAY, 5) != client


def test_without_a_file_and_a_token_nothing_is_said_on_loopback():
    assert auth.key(None, "", LOCAL, 5) is None
    assert auth.key(None, "", AWAY, 5).mechanism == NULL
    assert auth.key(None, "token", LOCAL, 5).mechanism == CURVE  # another user's server, or a tunnel's
    assert auth.key(None, auth.made(), LOCAL, 5).mechanism == PLAIN


OTHER = '{"mechanism": "x", "secret": "", "given": false}'


@pytest.mark.parametrize("text", ["", "{}", "[]", OTHER, '{"mechanism": "PLAIN"}', "é"])
def test_a_file_that_says_nothing_is_none(text):
    assert auth.read(text) is None
    assert auth.read(AccessEntry(PLAIN, "s", True).text()) == AccessEntry(PLAIN, "s", True)


def test_weak_tokens_are_warned_of():
    assert "can be guessed" in auth.weakness("hunter2") and "can be guessed" in auth.weakness("a" * 40)
    assert not auth.weakness(auth.strong()) and not auth.weakness("")


def test_gt_key_makes_a_file_that_is_the_users_alone(tmp_path, capsys):
    path = tmp_path / "key"
    assert cli(["key", str(path)]) == 0 and str(path) in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and not auth.weakness(path.read_text().strip())
    before = path.read_text()
    assert cli(["key", str(path)]) == 2 and "File exists" in capsys.readouterr().err
    assert path.read_text() == before


# ---- the files of running servers


def test_a_servers_file_is_the_users_alone_and_goes_with_it(folder):
    published = server_files.publish(LOCAL, 5, "text")
    (path,) = folder.glob("server-*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert server_files.find(LOCAL, 5) == "text"
    assert server_files.find("127.0.0.2", 5) is None and server_files.find(LOCAL, 6) is None
    published.remove()
    published.remove()
    assert server_files.find(LOCAL, 5) is None and not list(folder.iterdir())


def test_a_dead_servers_file_is_not_read_and_replaced(folder):
    dead = server_files.publish(LOCAL, 5, "old")
    os.close(dead._descriptor)  # what the kernel does to the lock of a killed process
    assert server_files.find(LOCAL, 5) is None
    other = server_files.publish(LOCAL, 6, "other")  # sweeps
    assert [path.name for path in folder.glob("server-*")] == [server_files._name(LOCAL, 6)]
    new = server_files.publish(LOCAL, 5, "new")
    dead._descriptor = os.open("/dev/null", os.O_RDONLY)
    dead.remove()  # late: the file is another's
    assert server_files.find(LOCAL, 5) == "new"
    new.remove()
    other.remove()


def test_servers_of_two_networks_that_share_a_folder_have_files_of_their_own(folder, monkeypatch):
    """The second one with a port replaced the file of the first, whose clients and workers were let in no more."""
    own = server_files.publish(LOCAL, 5, "own")
    network = server_files._network
    monkeypatch.setattr(server_files, "_network", lambda: "other")
    assert server_files.find(LOCAL, 5) is None and server_files.serves_elsewhere(5) and not server_files.serves_elsewhere(6)
    why = approach.Approach(f"{LOCAL}:1", LOCAL, 1, "", 1.0).why(0)
    assert why == "no server at 127.0.0.1:1 (tried for 0 s): start one with `python -m gt.server -p 1`"
    other = server_files.publish(LOCAL, 5, "other")
    assert server_files.find(LOCAL, 5) == "other"
    lost = server_files.publish(LOCAL, 1, "other")
    monkeypatch.setattr(server_files, "_network", network)
    assert server_files.find(LOCAL, 5) == "own"
    assert "in another network namespace" in approach.Approach(f"{LOCAL}:1", LOCAL, 1, "", 1.0).why(0)
    own.remove()
    assert server_files.find(LOCAL, 5) is None and server_files.serves_elsewhere(5)
    other.remove()
    lost.remove()
    assert not server_files.serves_elsewhere(5) and not [*folder.iterdir()]


def test_a_file_that_others_could_have_written_is_not_read(folder):
    published = server_files.publish(LOCAL, 5, "text")
    (path,) = folder.glob("server-*")
    path.chmod(0o644)
    assert server_files.find(LOCAL, 5) is None
    path.chmod(0o600)
    folder.chmod(0o755)
    assert server_files.find(LOCAL, 5) is None
    folder.chmod(0o700)
    assert server_files.find(LOCAL, 5) == "text"
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    assert server_files.find(LOCAL, 5) is None
    published.remove()
    assert path.is_symlink()


def test_a_folder_that_is_another_users_is_passed_over(folder, tmp_path, monkeypatch):
    last = tmp_path / "last"
    monkeypatch.setattr(server_files, "_folders", lambda: [folder, last])
    target = tmp_path / "target"
    target.mkdir(0o700)
    folder.symlink_to(target)
    published = server_files.publish(LOCAL, 5, "text")
    assert published.path.parent == last and not list(target.iterdir()) and server_files.find(LOCAL, 5) == "text"
    published.remove()
    last.chmod(0o777)
    with pytest.raises(Refused, match="its mode is 777, want 700"):
        server_files.publish(LOCAL, 5, "text")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Refused, match="belongs to user"):
        server_files.publish(LOCAL, 5, "text")


def test_a_full_disk_is_said_and_leaves_no_half_file(folder, monkeypatch):
    written = os.write
    for full in (lambda fd, text: written(fd, text[:2]), lambda fd, text: os.fstat(1 << 20)):
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(Refused, match=r"No space left|Bad file descriptor"):
            server_files.publish(LOCAL, 5, "text")
        assert not list(folder.iterdir())


def test_the_half_file_of_a_killed_server_goes_with_the_next(folder):
    server_files.publish(LOCAL, 5, "text").remove()
    (folder / ".server-127.0.0.1-7.99").touch(0o600)
    (folder / "own").touch()
    published = server_files.publish(LOCAL, 5, "text")
    assert {path.name for path in folder.iterdir()} == {server_files._name(LOCAL, 5), "own"}
    published.remove()


def test_a_stopped_process_that_has_the_folder_keeps_no_server_waiting_for_ever(folder, monkeypatch):
    monkeypatch.setattr(server_files, "ALONE_SECONDS", 0.05)
    published = server_files.publish(LOCAL, 5, "text")
    with server_files._alone(folder):
        with pytest.raises(Refused, match=r"another process keeps .* locked"):
            server_files.publish(LOCAL, 6, "text")
        assert server_files.find(LOCAL, 5) == "text"
        published.remove()  # what it leaves is a dead server's
    assert server_files.find(LOCAL, 5) is None
    with server_files._alone(folder):
        inherited = os.dup(max(fd for fd in map(int, os.listdir("/proc/self/fd")) if _leads(fd) == folder))
    server_files.publish(LOCAL, 6, "text").remove()  # a process that was forked meanwhile keeps nothing
    os.close(inherited)


def _leads(fd: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    return None


def test_a_pipe_of_a_servers_name_is_not_waited_for(folder):
    server_files.publish(LOCAL, 5, "text").remove()
    os.mkfifo(folder / server_files._name(LOCAL, 5), 0o600)
    assert server_files.find(LOCAL, 5) is None
    server_files.publish(LOCAL, 5, "text").remove()


@pytest.mark.parametrize("text, says", [(b"", "it is empty"), (b" \n", "it is empty"), (b"\xff\xfe", "it is no text")])
@pytest.mark.parametrize("option", ["--token-file", "--worker-token-file"])
def test_a_token_file_without_a_token_is_refused(tmp_path, capsys, folder, text, says, option):
    """A server went on without any, and let in who had none."""
    path = tmp_path / "token"
    path.write_bytes(text)
    for program in (server.main, worker.main):
        assert program(["-p", "0" if program is server.main else "1", option, str(path)]) == 2
        assert f"{path} cannot be read: {says}" in capsys.readouterr().err


# ---- connecting


@pytest.mark.parametrize("access", [Access(), Access("people's"), Access(encrypt=True), Access("t", encrypt=True)])
def test_the_users_own_clients_are_let_in(folder, access):
    with Running(access) as running:
        Session(running.address, token=access.token).close()
        if access.token:
            with pytest.raises(Refused, match="another token"):
                Session(running.address, token="guess")
            with pytest.raises(Refused, match="wants a token"):
                Session(running.address)


@pytest.mark.parametrize(
    ("access", "told"), [(Access(), 1), (Access(encrypt=True), 1), (Access(secret="start-5"), 1), (Access("t"), 0)]
)
def test_who_has_a_token_is_told_that_the_server_does_not_ask_for_it(folder, access, told, caplog):
    with Running(access) as running:
        for token in ("t", *["start-5"] * (not access.token)):  # the other is no person's: a program's own server has it
            Session(running.address, token=token).close()
    told_of = [
        record.getMessage() for record in caplog.records if "has no token, and this process has one" in record.getMessage()
    ]
    assert len(told_of) == told and all(running.address in text and "unset it here" in text for text in told_of)


@pytest.mark.skipif(not socket.has_ipv6, reason="this kernel has no IPv6")
@pytest.mark.parametrize("access", [Access(), Access(encrypt=True)])
def test_a_server_listens_on_several_addresses(folder, access):
    with Running(access, host=f"{LOCAL},::1") as running:
        for host in (LOCAL, "[::1]", "localhost"):
            Session(f"{host}:{running.port}").close()
        assert running.address == f"{LOCAL}:{running.port}" and len(list(folder.rglob("server-*"))) == 2
    assert not list(folder.rglob("server-*"))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
def test_a_server_on_all_addresses_of_ipv6_has_those_of_ipv4_too(folder):
    with Running(Access("t"), host="::") as running:
        assert running.address == f"[::]:{running.port}"
        for host in (LOCAL, "[::1]"):
            Session(f"{host}:{running.port}", token="t").close()


@pytest.mark.parametrize("address", ["::1:5", "[::1]", "[]:5", "[::1]:0", ":5", "a:b:5", 12345])
def test_an_address_is_a_host_and_a_port_and_one_of_ipv6_in_brackets(address):
    with pytest.raises(DispatcherLost, match=r"is not an address: want host:port, such as .* or \[::1\]:\d+, with"):
        host_and_port(address)


def test_without_the_file_a_token_opens_a_server_that_encrypts(folder, monkeypatch):
    with Running(Access("t", encrypt=True)) as first, Running(Access("t")) as second:
        monkeypatch.setattr(server_files, "find", lambda ip, port: None)  # another user's process
        Session(first.address, token="t").close()
        with pytest.raises(Refused, match="another token"):
            Session(first.address, token="guess")
        with pytest.raises(Refused, match="lets in its own user's processes only: start it with --encrypt"):
            Session(second.address, token="t")
        with pytest.raises(DispatcherLost, match="is of another user"):
            Session(second.address, wait=0.2)


def test_a_worker_waits_for_a_server_and_finds_the_next_ones_secret(folder, monkeypatch):
    monkeypatch.setattr(approach, "LAST_PAUSE_SECONDS", 0.03)
    heard, lost = threading.Event(), threading.Event()
    (port,) = free_ports()
    first = Running(port=port)
    first.__exit__()
    link = Dealer(first.address, lambda *_: heard.set(), lambda reason: lost.set(), timeouts=LinkTimeouts(connect=None))
    link.send(hello("client"))
    with Running(port=port):
        assert heard.wait(limit(10)) and not lost.is_set()
        link.close()


def test_a_refused_worker_is_told_once_and_for_all(folder):
    told: list = []
    over = threading.Event()
    with Running(Access("right")) as running:
        link = Dealer(
            running.address,
            lambda message, _: (told.append(message), over.set()),
            told.append,
            timeouts=LinkTimeouts(connect=None),
            token="wrong",
        )
        assert over.wait(limit(10))
        link.close()
    assert [type(message) for message in told] == [Reject] and "another token" in told[0].error["message"]


class Fake:
    """Listens where a server should, answers as one, and keeps all that it hears."""

    def __init__(self, mechanism: str, ip: str = LOCAL, port: int = 0) -> None:
        self.heard = b""
        self._sock = socket.create_server((ip, port))
        self._sock.settimeout(0.1)
        self.port = self._sock.getsockname()[1]
        self._mechanism, self._over = mechanism, False
        self._thread = threading.Thread(target=self._run, name="test-fake")
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                continue
            with sock:
                sock.settimeout(limit(0.5))
                sock.sendall(zmtp.greeting(self._mechanism)[:32] + b"\x01" + bytes(31))
                try:
                    self.heard += zmtp.read(sock, 64)
                    self.heard += zmtp.read(sock, 2)
                    sock.sendall(zmtp.frame(b"\x07WELCOME" if self._mechanism == PLAIN else zmtp.READY, command=True))
                    self.heard += zmtp.read(sock, 4096)
                except OSError:
                    pass

    def close(self) -> bytes:
        self._over = True
        self._thread.join()
        self._sock.close()
        return self.heard


@pytest.mark.parametrize("mechanism", [PLAIN, NULL, CURVE])
@pytest.mark.parametrize("token", ["", "the token that people gave"])
def test_a_process_that_takes_the_port_first_learns_nothing_that_opens_a_server(folder, mechanism, token):
    fake = Fake(mechanism, port=free_ports()[0])
    with pytest.raises((DispatcherLost, Refused)):
        Session(f"{LOCAL}:{fake.port}", ("config: text", ""), token=token, wait=0.6)
    heard = fake.close()
    assert b"config" not in heard and (b"HELLO" not in heard or mechanism == CURVE)
    assert b"token that people" not in heard
    with Running(Access(token), port=fake.port) as running:  # the real one, on that very port
        with zmtp.connect(running.port) as sock:
            with contextlib.suppress(OSError):  # it may be put out by then
                sock.sendall(heard)
                sock.shutdown(socket.SHUT_WR)
            assert b"READY" not in zmtp.read(sock, 4096) and not running.server._gates


def test_a_listener_at_another_loopback_address_is_told_nothing(folder):
    with Running() as running:
        fake = Fake(PLAIN, "127.0.0.2", running.port)
        with pytest.raises(DispatcherLost):
            Session(f"127.0.0.2:{running.port}", wait=0.3)
        assert b"HELLO" not in fake.close()


def test_a_dead_servers_secret_is_not_told_to_who_takes_its_port(folder):
    """Killed: its file is left, its lock is not."""
    dead = server_files.publish(LOCAL, 5, AccessEntry(PLAIN, auth.made()).text())
    os.close(dead._descriptor)
    fake = Fake(PLAIN)
    os.rename(dead.path, dead.path.with_name(f"server-{LOCAL}-{fake.port}"))
    with pytest.raises(DispatcherLost, match="is of another user"):
        Session(f"{LOCAL}:{fake.port}", wait=0.2)
    assert b"HELLO" not in fake.close()


def test_a_listener_that_is_no_server_is_named(folder):
    with socket.create_server((LOCAL, 0)) as silent:  # takes connections, says nothing: stopped, or out of descriptors
        with pytest.raises(DispatcherLost, match=r"does not answer .*: it is stopped, busy, or out of descriptors"):
            Session(f"{LOCAL}:{silent.getsockname()[1]}", token="token", wait=0.1)
