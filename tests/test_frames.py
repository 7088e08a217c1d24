"""Messages over a socket pair: whole, checked, and never waited for in the middle."""

import pytest

from areno.frames import FrameError, Frames


@pytest.fixture
def ends():
    ours, theirs = Frames.pair(1000)
    other = Frames.join(theirs.detach())
    yield ours, other
    ours.close()
    other.close()


def test_messages_arrive_whole_and_in_order_both_ways(ends):
    ours, other = ends
    bodies = [b"", b"one", bytes(1000)]
    for body in bodies:
        other.send(body)
    assert ours.arrived() == bodies
    assert ours.arrived() == []
    ours.send(b"long " * 30_000)  # the limit is of what the starting side accepts
    assert other.receive(1.0) == b"long " * 30_000


def test_half_a_message_is_not_waited_for(ends):
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
def test_other_bytes_are_an_error_at_once(ends, sent):
    ours, other = ends
    other.send(b"before")
    other._socket.send(bytes([other._form._key[0] ^ 1]) + sent[1:])  # what is sent by chance may begin as the key does
    assert ours.arrived() == [b"before"]
    with pytest.raises(FrameError, match="not a message"):
        ours.arrived()


def test_announced_sizes_are_limited(ends):
    ours, other = ends
    other._socket.send(other._form._key + (10**12).to_bytes(8))
    with pytest.raises(FrameError, match=r"1,000,000,000,000 bytes, above the limit of 1,000"):
        ours.arrived()


def test_the_end_of_the_other_side_comes_after_what_it_said(ends):
    ours, other = ends
    other.send(b"last")
    other.close()
    assert ours.receive() == b"last"
    with pytest.raises(EOFError):
        ours.receive()
    with pytest.raises(OSError):
        ours.send(b"too late")


def test_a_side_that_does_not_read_is_not_written_to_for_ever(ends):
    ours, _ = ends
    with pytest.raises(TimeoutError):
        ours.send(bytes(10**7), 0.05)
