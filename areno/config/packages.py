"""Optional packages: which are missing, found out without importing them."""

from __future__ import annotations

import importlib.util


def missing_server_packages() -> list[str]:
    """Names of the packages that serving needs and that are not installed."""
    return _missing("fastapi", "uvicorn", "prometheus_client")


def missing_lora_packages(*, four_bit: bool) -> list[str]:
    """Names of the packages that adapters need, and a base in 4 bits with ``four_bit``, and that are not installed."""
    return _missing("peft", *(["bitsandbytes"] if four_bit else []))


def _missing(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]
