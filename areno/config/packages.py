"""Optional packages: which are missing, found out without importing them."""

from __future__ import annotations

import importlib.util


def missing_server_packages() -> list[str]:
    """Names of the packages that serving needs and that are not installed."""
    return [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
