"""Runs a command on a terminal of 80 x 24 and writes the last frame of its live display to ``docs/pictures/screen.svg``.

    python docs/make_screen.py areno train --config sums.yaml ...

The script also prints the frame as plain text. Some pages of the documentation contain a copy of this text.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).with_name("pictures") / "screen.svg"
WIDTH, HEIGHT = 80, 24
_FRAME_BEGINS = re.compile(r"(?:\x1b\[1A\x1b\[2K)+|\x1b\[\?25[hl]")
"""Terminal codes before each frame, which erase the previous frame line by line."""
_REMOTE_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def last_frame(command: list[str]) -> str:
    """Run a command that shows a live display, and return the last frame of this display.

    The frame contains the terminal's codes for colors and styles.
    """
    controller, terminal = pty.openpty()
    variables = {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, **variables}
    )
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(controller, 65536):
            output += chunk
    except OSError:  # how Linux reports that the other end was closed
        process.wait()
    frames = [part for part in _FRAME_BEGINS.split(output.decode()) if re.search(r"\d+/\d+", part)]
    return frames[-1].replace("\r", "").strip("\n")


def main() -> None:
    """Write ``PICTURE`` for the command in the script's arguments, and print the frame as plain text."""
    text = Text.from_ansi(last_frame(sys.argv[1:]))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(text, end="")
        PICTURE.parent.mkdir(exist_ok=True)
        svg = console.export_svg(title="areno train")
        PICTURE.write_text(_REMOTE_FONTS.sub("", svg), encoding="utf-8")
    sys.stdout.write(f"{text.plain}\n")


if __name__ == "__main__":
    main()
