"""A page in headless Chromium."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def browse(url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page; console messages are on standard error. Skips the test if Chromium is missing."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed")
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder; yields the address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
