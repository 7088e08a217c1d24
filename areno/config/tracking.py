"""Experiment tracking services: which there are, and what each needs before a run begins. Imports none of them."""

import importlib.util
import os
from netrc import NetrcParseError, netrc
from urllib.parse import urlparse

from areno.config.packages import install_command

_MODES = {"wandb": ("WANDB_MODE", "online"), "swanlab": ("SWANLAB_MODE", "cloud"), "trackio": ("TRACKIO_MODE", "local")}
SERVICES = tuple(_MODES)


def mode_of(service: str) -> str:
    """How a service is used that is only named: what its own environment variable says, else its usual mode."""
    variable, usual = _MODES[service]
    return os.environ.get(variable) or usual


def service_problem(service: str, mode: str, *, key: str = "", address: str = "") -> str | None:
    """What a service lacks in a mode: its package or, as far as it can be known, a login; None if nothing.

    ``key`` is what the run gives it, and ``address`` a W&B server's; only W&B is asked for a login.
    """
    if importlib.util.find_spec(service) is None:
        return f"needs the package {service}; install it: {install_command('track')}"
    if service == "wandb" and mode == "online" and not (key or has_wandb_login(address)):
        return (
            "needs a login, and there is none: run `wandb login`, set WANDB_API_KEY, or use mode offline (WANDB_MODE)"
        )
    return None


def has_wandb_login(address: str) -> bool:
    """Whether W&B would find a key by itself: in the environment, or where ``wandb login`` stores it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(address or os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
