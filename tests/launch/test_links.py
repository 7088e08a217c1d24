"""Workers connect to the process that started them: which are accepted, and what a man in the middle can do."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from areno.errors import EngineError
from areno.frames import FrameError, Frames, SignedFormat
from areno.launch import links
from areno.launch.links import Connection, Listener, dial


@pytest.fixture
def listener():
    made = Listener("127.0.0.1")
    yield made
    made.close()


def dial_as(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return dial()


def test_a_worker_that_knows_the_key_is_connected_and_messages_arrive_whole(listener, monkeypatch):
    expected = listener.expect("rollout/0/one")
    worker = dial_as(monkeypatch, listener.environment("rollout/0/one"))
    assert links.LINK not in os.environ  # child processes of the worker do not get the key
    assert links.KEY not in os.environ
    assert os.environ[links.NODE_ADDRESS] == "127.0.0.1"
    monkeypatch.delenv(links.NODE_ADDRESS)
    starter = expected.result(5)
    assert starter.key == worker.key
    assert starter.far
    ours, theirs = starter.frames(1 << 24), worker.frames()
    large = os.urandom(3 << 20)
    sent = threading.Thread(target=lambda: [theirs.send(text) for text in (b"first", b"", large)])
    sent.start()
    assert [ours.receive(5) for _ in range(3)] == [b"first", b"", large]
    sent.join()
    ours.send(b"back")
    assert theirs.receive(5) == b"back"
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive(5)


def test_other_processes_are_rejected(listener, monkeypatch):
    expected = listener.expect("actor/0")
    right = listener.environment("actor/0")
    for variables in (
        right | {links.KEY: "00" * 32},
        right | {links.LINK: right[links.LINK].replace("actor/0", "actor/1")},
    ):
        with pytest.raises(EngineError, match=r"cannot connect to .*: the other process has closed the connection"):
            dial_as(monkeypatch, variables)
    assert not expected.done()
    dial_as(monkeypatch, right)
    assert expected.result(5).socket.fileno() >= 0
    with pytest.raises(EngineError, match="closed the connection"):  # a name is used once
        dial_as(monkeypatch, right)


def test_a_worker_does_not_trust_a_starter_without_the_key(monkeypatch):
    other, impostor = Listener("127.0.0.1"), socket.create_server(("127.0.0.1", 0))

    def answer():
        sock, _ = impostor.accept()
        sock.sendall(bytes(32))
        sock.recv(1000)
        sock.sendall(bytes(32))

    threading.Thread(target=answer, daemon=True).start()
    variables = other.environment("w") | {links.LINK: f"127.0.0.1:{impostor.getsockname()[1]}/w"}
    with pytest.raises(EngineError, match="does not know the key of this run"):
        dial_as(monkeypatch, variables)
    other.close()
    impostor.close()


def test_silent_strangers_do_not_delay_workers(listener, monkeypatch):
    strangers = [socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2]))) for _ in range(20)]
    expected, began = listener.expect("w"), time.monotonic()
    dial_as(monkeypatch, listener.environment("w"))
    assert expected.result(5).far
    assert time.monotonic() - began < 3
    for stranger in strangers:
        stranger.close()


def test_a_failed_connection_names_the_address(monkeypatch):
    with pytest.raises(EngineError, match=r"cannot connect to 127\.0\.0\.1:9, the process that started this worker"):
        dial_as(monkeypatch, {links.LINK: "127.0.0.1:9/w", links.KEY: "00" * 32})


def ends(key=b"k" * 32):
    """Two ends, and the raw sockets between them: what one sends can be changed before the other receives it."""
    one, first = socket.socketpair()
    two, second = socket.socketpair()
    sender = Frames(one, SignedFormat(key, True), 1 << 20)
    receiver = Frames(two, SignedFormat(key, False), 1 << 20)
    return sender, receiver, first, second


def flipped(text, index):
    return text[:index] + bytes([text[index] ^ 1]) + text[index + 1 :]


@pytest.mark.parametrize("index", [0, 7, 8, 39, 40, 44, 45, 76])
def test_a_frame_with_any_changed_bit_is_rejected(index):
    sender, receiver, first, second = ends()
    sender.send(b"hello")
    text = first.recv(1000)
    assert len(text) == 8 + 32 + 5 + 32
    second.sendall(flipped(text, index))
    with pytest.raises(FrameError, match="without a valid signature"):
        receiver.receive(5)


def test_replayed_dropped_and_reflected_frames_are_detected():
    sender, receiver, first, second = ends()
    sender.send(b"pay")
    text = first.recv(1000)
    second.sendall(text)
    assert receiver.receive(5) == b"pay"
    second.sendall(text)
    with pytest.raises(FrameError, match="without a valid signature"):
        receiver.receive(5)

    sender, receiver, first, second = ends()
    sender.send(b"one")
    first.recv(1000)
    sender.send(b"two")
    second.sendall(first.recv(1000))
    with pytest.raises(FrameError, match="without a valid signature"):
        receiver.receive(5)

    sender, _, first, _ = ends()
    sender.send(b"one")
    first.sendall(first.recv(1000))
    with pytest.raises(FrameError, match="without a valid signature"):
        sender.receive(5)


def test_a_frame_of_an_unsigned_length_is_not_waited_for():
    _, receiver, _, second = ends()
    second.sendall((1 << 40).to_bytes(8) + bytes(32))
    with pytest.raises(FrameError, match="without a valid signature"):
        receiver.receive(5)


def test_connections_on_one_machine_need_no_key():
    one, two = socket.socketpair()
    starter, worker = Connection(one, None, dials=False), Connection(two, None, dials=True)
    assert not starter.far
    ours = starter.frames(100)
    theirs = worker.frames()
    theirs.send(b"x")
    assert ours.receive(5) == b"x"
