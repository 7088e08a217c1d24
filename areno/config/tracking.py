"""Experiment tracking services and their prerequisites. The module does not import the services' packages."""

import importlib.util
import os
from netrc import NetrcParseError, netrc
from urllib.parse import urlparse

from areno.config.packages import install_command

_MODES = {
    "wandb": ("WANDB_MODE", "online"),
    "swanlab": ("SWANLAB_MODE", "cloud"),
    "trackio": ("TRACKIO_MODE", "local"),
    "mlflow": ("", "enabled"),  # MLFLOW_TRACKING_URI sets the server
}
SERVICES = tuple(_MODES)


def mode_of(service: str) -> str:
    """Return the mode of a service: the value of its environment variable, or its default mode."""
    variable, default = _MODES[service]
    return os.environ.get(variable) or default


def service_problem(service: str, mode: str, *, key: str = "", address: str = "") -> str | None:
    """Return what a tracking service lacks, and how to provide it; None if nothing is missing.

    Every service needs its package. W&B in the mode ``online`` also needs an API key (``key``) or a login. ``address`` is the
    address of the W&B server.
    """
    if importlib.util.find_spec(service) is None:
        return f"needs the package {service}; install it: {install_command('track')}"
    if service == "wandb" and mode == "online" and not (key or has_wandb_login(address)):
        return "is not logged in; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE to offline"
    return None


def has_wandb_login(address: str) -> bool:
    """Whether W&B credentials are in the environment, or in the netrc file to which ``wandb login`` writes."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(address or os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
