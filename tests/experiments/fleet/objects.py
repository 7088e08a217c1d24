"""Objects that the workers of these tests hold."""

from __future__ import annotations

import logging
import os
import sys
import time


class Echo:
    def __init__(self, number: int) -> None:
        self.number = number

    def about(self) -> dict[str, str]:
        return {name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MARK", "LOCAL_RANK")}

    def speak(self, text: str) -> None:
        print(f"printed {text}", flush=True)
        print(f"written {text}", file=sys.stderr, flush=True)
        logging.getLogger("areno.test").info("logged %s", text)
        logging.getLogger("areno.test").warning("warned %s", text)


def make(number: int, _send) -> Echo:
    return Echo(number)


def refuse(_number: int, _send) -> Echo:
    print("about to fail", flush=True)
    raise ValueError("nothing can be made here")


def dawdle(number: int, _send) -> Echo:
    time.sleep(60)
    return Echo(number)
