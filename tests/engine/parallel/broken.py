"""Objects of worker groups that break the protocol or hang. Imports little, so that their processes start quickly."""

from __future__ import annotations

import gc
import os
import signal
import time

import areno.frames


class Broken:
    """Violates the protocol on demand."""

    def __init__(self) -> None:
        self.frames = next(each for each in gc.get_objects() if isinstance(each, areno.frames.Frames))

    def nothing(self) -> None:
        """Answer normally."""

    def stop_in_mid_answer(self) -> None:
        self.frames._socket.send(self.frames._form._key + (1000).to_bytes(8) + bytes(10))
        os.kill(os.getpid(), signal.SIGSTOP)

    def garble(self, text: bytes) -> None:
        self.frames._socket.send(text)
        time.sleep(60)

    def send_text(self, text: bytes) -> None:
        self.frames.send(text)
        time.sleep(60)


def make_broken(send) -> Broken:
    return Broken()


def load_forever(send) -> Broken:
    """Never return, like a loader that waits for a file system or a lock."""
    while True:
        time.sleep(0.05)
