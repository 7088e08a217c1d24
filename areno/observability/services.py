"""Experiment tracking services: TensorBoard, Weights & Biases, SwanLab and Trackio, each behind the same three methods.

Special here: a service's package is imported when a run uses it and not before, and one that is missing is said with the
command that installs it. A service that keeps its own history continues it: what a resumed run does again is shown after
what it did before the crash, because none of these services can take a point back.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areno.errors import UsageError
from areno.observability.tensorboard import EventWriter

if TYPE_CHECKING:
    from areno.config.experiment.run_sections import SwanlabConfig, TrackioConfig, WandBConfig

_log = logging.getLogger(__name__)


Section = Mapping[str, Any] | None


class Service(Protocol):
    """Somewhere that statistics are sent to."""

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one step; a service whose history is longer moves the step behind it."""

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True, slots=True)
class RunName:
    """What services call a run."""

    experiment: str  # name of the experiment
    trial: str  # name of the trial
    config: Mapping[str, Any] = field(default_factory=dict)  # resolved, as plain data and without secrets

    def run_id(self, suffix: str | None) -> str:
        """``{experiment}_{trial}_{suffix}``, in characters that services accept: the same after each restart."""
        parts = [self.experiment, self.trial, *([suffix] if suffix else [])]
        return plain("_".join(parts))


def plain(name: str) -> str:
    """A name in the characters that every service accepts."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def open_services(
    run: RunName,
    folder: Path,
    *,
    wandb: Section = None,
    swanlab: Section = None,
    tensorboard: Section = None,
    trackio: Section = None,
) -> list[Service]:
    """Open the services that are not disabled; ``folder`` is the run's. Raises UsageError: one cannot be used."""
    services: list[Service] = []
    if tensorboard and tensorboard.get("path"):
        services.append(EventWriter(Path(tensorboard["path"]).expanduser(), option="tensorboard.path"))
    if not (wandb or swanlab or trackio):
        return services
    from areno.config.experiment.run_sections import SwanlabConfig, TrackioConfig, WandBConfig  # loads OmegaConf

    makers: list[tuple[str, Callable[..., Service], Any, tuple[str, ...]]] = [
        ("wandb", _wandb, WandBConfig(**wandb or {}), ("online", "offline", "shared")),
        ("swanlab", _swanlab, SwanlabConfig(**swanlab or {}), ("cloud", "local", "offline")),
        ("trackio", _trackio, TrackioConfig(**trackio or {}), ("online", "local")),
    ]
    try:
        for name, make, section, modes in makers:
            mode = {True: modes[0], False: "disabled", None: "disabled"}.get(section.mode, section.mode)
            if mode in modes:
                services.append(make(run, folder, mode, section))
            elif mode != "disabled":
                known = ", ".join((*modes, "disabled"))
                raise UsageError(f"{name}.mode={section.mode!r} is not a mode; use one of {known}")
    except BaseException:
        for service in services:
            service.close()
        raise
    return services


class ServiceGroup:
    """Services that all get the same numbers; one that fails is left out, and ``kept_in`` named as what has all values."""

    def __init__(self, services: Iterable[Service], kept_in: Path) -> None:
        self._services, self._kept_in = list(services), kept_in

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        for service in list(self._services):
            try:
                service.log(step, numbers)
            except Exception as error:  # a service's own failure, of whatever type
                self._services.remove(service)
                _log.error("%s is left out from now on: %s; %s has all values", service.name, error, self._kept_in)

    def close(self) -> None:
        """Close all; a second call does nothing."""
        services, self._services = self._services, []
        for service in services:
            try:
                service.close()
            except Exception as error:  # a service's own failure, of whatever type
                _log.error("%s did not end properly: %s; %s has all values", service.name, error, self._kept_in)


def _package(section: str, package: str, pip_name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"{section}.mode needs the package {package}, which cannot be imported ({error}); "
            f"pip install {pip_name!r}, or set {section}.mode=disabled"
        ) from error


def _opened(section: str, opening: Callable[[], Any]) -> Any:
    """What a service's ``init`` returns; its refusals are the user's to solve."""
    try:
        return opening()
    except Exception as error:
        raise UsageError(
            f"{section} cannot be started: {error}; check its login and address, or set {section}.mode=disabled"
        ) from error


class _TrackedRun:
    """A run of a service with a package of its own; ``next_step`` gives the least step that it takes after the last one."""

    def __init__(
        self,
        name: str,
        run: Any,
        next_step: Callable[[int], int] = lambda last: last + 1,
        takes: Callable[[float], bool] = lambda value: True,
        **options: Any,
    ) -> None:
        self.name, self._run, self._options = name, run, options
        self._next_step, self._takes, self._last = next_step, takes, -1

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._last = max(step, self._next_step(self._last))
        sent = {name: value for name, value in numbers.items() if self._takes(value)}
        self._run.log(sent, step=self._last, **self._options)

    def close(self) -> None:
        self._run.finish()


def _wandb(run: RunName, folder: Path, mode: str, section: WandBConfig) -> Service:
    """Weights & Biases, resumed under the run's name after a restart; without an API key the login is left to W&B."""
    wandb = _package("wandb", "wandb", "wandb")
    settings = {"console": "off", "silent": True}  # it would take the terminal's output for itself
    settings |= {"api_key": section.wandb_api_key} if section.wandb_api_key else {}
    settings |= {"base_url": section.wandb_base_url} if section.wandb_base_url else {}
    folder.mkdir(parents=True, exist_ok=True)
    opened = _opened(
        "wandb",
        lambda: wandb.init(
            dir=str(folder),
            mode=mode,
            id=run.run_id(section.id_suffix),
            resume="allow" if mode != "offline" else None,
            entity=section.entity,
            project=section.project or run.experiment,
            name=section.name or run.trial,
            job_type=section.job_type,
            group=section.group or f"{run.experiment}_{run.trial}",
            notes=section.notes,
            tags=section.tags,
            config=dict(run.config if section.config is None else section.config),
            settings=wandb.Settings(**settings),
        ),
    )
    _log.info("W&B (%s): %s", mode, opened.url or opened.dir)
    return _TrackedRun("W&B", opened, lambda _: opened.step, commit=True)


def _swanlab(run: RunName, folder: Path, mode: str, section: SwanlabConfig) -> Service:
    """SwanLab, which draws finite numbers only; without an API key the login is left to it."""
    swanlab = _package("swanlab", "swanlab", "swanlab")
    if mode == "local":
        _package("swanlab", "swanboard", "swanlab[dashboard]")
    if mode == "cloud" and section.api_key:
        _opened("swanlab", lambda: swanlab.login(api_key=section.api_key))
    # Only its cloud can continue a run; on this machine a restart is a run of its own, of the same name.
    resumed = {"id": run.run_id(None), "resume": "allow"} if mode == "cloud" else {}
    opened = _opened(
        "swanlab",
        lambda: swanlab.init(
            project=section.project or plain(run.experiment),
            name=section.name or run.trial,
            config=dict(run.config if section.config is None else section.config),
            log_dir=str(Path(section.logdir).expanduser() if section.logdir else folder / "swanlab"),
            mode="online" if mode == "cloud" else mode,
            **resumed,
        ),
    )
    return _TrackedRun("SwanLab", opened, takes=math.isfinite)


def _trackio(run: RunName, folder: Path, mode: str, section: TrackioConfig) -> Service:
    """Trackio: a local data base where ``TRACKIO_DIR`` says, or a Hugging Face Space."""
    if (mode == "online") != bool(section.space_id):
        remedy = "give trackio.space_id=user/space" if mode == "online" else "use trackio.mode=online"
        raise UsageError(f"trackio.mode={mode} with trackio.space_id={section.space_id!r}: {remedy}")
    trackio = _package("trackio", "trackio", "trackio")
    opened = _opened(
        "trackio",
        lambda: trackio.init(
            section.project or run.experiment,
            name=section.name or run.trial,
            space_id=section.space_id,
            config=dict(run.config),
            resume="allow",
            embed=False,
        ),
    )
    # The run knows how far its history goes, and says so only by what it gives a step without a number.
    return _TrackedRun("Trackio", opened, lambda last: getattr(opened, "_next_step", 0) if last < 0 else last + 1)
