"""What compiled code depends on besides its source."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor() -> str:
    """Names what this processor can do, so that a cache folder shared between machines tells them apart."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return f"{platform.system()} {platform.machine()} {platform.processor()} {flags.group(1) if flags else ''}"
