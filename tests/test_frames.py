"""Messages over a socket pair arrive complete and validated, and a partial message does not block."""

import pytest

from areno.frames import FrameError, Frames


@pytest.fixture
def ends():
    ours, theirs = Frames.pair(1000)
    other = Frames.join(theirs.detach())
    yield ours, other
    ours.close()
    other.close()


def test_messages_arrive_complete_and_in_order_in_both_directions(ends):
    ours, other = ends
    bodies = [b"", b"one", bytes(1000)]
    for body in bodies:
        other.send(body)
    assert ours.arrived() == bodies
    assert ours.arrived() == []
    ours.send(b"long " * 30_000)  # the limit applies only to what the starting side accepts
    assert other.receive(1.0) == b"long " * 30_000


def test_a_partial_message_does_not_block_and_can_be_completed_later(ends):
    ours, other = ends
    other.send(b"first")
    other._socket.send(other._form._key + (8).to_bytes(8) + b"half")
    assert ours.arrived() == [b"first"]
    assert ours.arrived() == []
    with pytest.raises(TimeoutError):
        ours.receive(0.05)
    other._socket.send(b"rest")
    assert ours.arrived() == [b"halfrest"]


@pytest.mark.parametrize("sent", [b"x", b"garbage" * 10, (5).to_bytes(4) + b"12345"])
def test_bytes_that_are_not_a_message_are_an_error_at_once(ends, sent):
    ours, other = ends
    other.send(b"before")
    other._socket.send(bytes([other._form._key[0] ^ 1]) + sent[1:])  # must differ from the random key
    assert ours.arrived() == [b"before"]
    with pytest.raises(FrameError, match="not a message"):
        ours.arrived()


def test_announced_sizes_are_limited(ends):
    ours, other = ends
    other._socket.send(other._form._key + (10**12).to_bytes(8))
    with pytest.raises(FrameError, match=r"1,000,000,000,000 bytes, above the limit of 1,000"):
        ours.arrived()


def test_a_closed_connection_is_reported_after_the_last_message(ends):
    ours, other = ends
    other.send(b"last")
    other.close()
    assert ours.receive() == b"last"
    with pytest.raises(EOFError):
        ours.receive()
    with pytest.raises(OSError):
        ours.send(b"too late")


def test_sending_to_a_side_that_does_not_read_times_out(ends):
    ours, _ = ends
    with pytest.raises(TimeoutError):
        ours.send(bytes(10**7), 0.05)
