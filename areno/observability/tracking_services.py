"""Sends metrics to experiment tracking services: TensorBoard, Weights & Biases, SwanLab, Trackio and MLflow.

The package of a service is imported only if a run uses the service. If the package is missing, an error shows the install
command. A resumed run continues its history if the service supports resuming. The services cannot delete values. If a resumed
run repeats a step, MLflow keeps the old and the new values of this step, and most other services record the new values under a
later step number.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areno.config.yaml_io import flat
from areno.errors import UsageError
from areno.observability.tensorboard import EventWriter

if TYPE_CHECKING:
    from areno.config.experiment.run_sections import MLflowConfig, SwanlabConfig, TrackioConfig, WandBConfig

_log = logging.getLogger(__name__)


Section = Mapping[str, Any] | None
_SHARED_STEP = "step"


class TrackingService(Protocol):
    """Interface of a service that receives the statistics of a run."""

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send numbers of a step. Consecutive calls may send further numbers of the same step.

        If a resumed run repeats a step that the service has already received, the service may record ``numbers`` under a later
        step number.
        """

    def close(self) -> None:
        """Send the queued numbers, and close the service."""


@dataclass(frozen=True, slots=True)
class RunName:
    """Names and configuration of a run, as tracking services receive them."""

    experiment: str
    trial: str
    config: Mapping[str, Any] = field(default_factory=dict)  # resolved configuration as plain data, without secrets

    def run_id(self, suffix: str | None) -> str:
        """Return ``{experiment}_{trial}_{suffix}`` in characters that services accept. A restarted run has the same ID."""
        parts = [self.experiment, self.trial, *([suffix] if suffix else [])]
        return plain("_".join(parts))


def plain(name: str) -> str:
    """Return the name with a hyphen in place of each character that a service might reject."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def open_services(
    run: RunName,
    folder: Path,
    *,
    wandb: Section = None,
    swanlab: Section = None,
    tensorboard: Section = None,
    trackio: Section = None,
    mlflow: Section = None,
) -> list[TrackingService]:
    """Open the enabled services; ``folder`` is the run's directory. Raises UsageError if a service cannot be used."""
    services: list[TrackingService] = []
    if tensorboard and tensorboard.get("path"):
        services.append(EventWriter(Path(tensorboard["path"]).expanduser(), option="stats_logger.tensorboard.path"))
    if not (wandb or swanlab or trackio or mlflow):
        return services
    from areno.config.experiment.run_sections import (
        MLflowConfig,
        SwanlabConfig,
        TrackioConfig,
        WandBConfig,
    )  # loads OmegaConf

    makers: list[tuple[str, Callable[..., TrackingService], Any, tuple[str, ...]]] = [
        ("wandb", _wandb, WandBConfig(**wandb or {}), ("online", "offline", "shared")),
        ("swanlab", _swanlab, SwanlabConfig(**swanlab or {}), ("cloud", "local", "offline")),
        ("trackio", _trackio, TrackioConfig(**trackio or {}), ("online", "local")),
        ("mlflow", _mlflow, MLflowConfig(**mlflow or {}), ("enabled",)),
    ]
    try:
        for name, make, section, modes in makers:
            mode = {True: modes[0], False: "disabled", None: "disabled"}.get(section.mode, section.mode)
            if mode in modes:
                services.append(make(run, folder, mode, section))
            elif mode != "disabled":
                supported = ", ".join((*modes, "disabled"))
                raise UsageError(f"stats_logger.{name}.mode={section.mode!r} is unknown; use one of {supported}")
    except BaseException:
        for service in services:
            service.close()
        raise
    return services


class ServiceGroup:
    """Sends the same numbers to several services.

    After a service has failed, no more numbers are sent to this service. The file ``metrics_path`` has all numbers.
    """

    def __init__(self, services: Iterable[TrackingService], metrics_path: Path) -> None:
        self._services, self._metrics_path = list(services), metrics_path

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        for service in list(self._services):
            try:
                service.log(step, numbers)
            except Exception as error:  # services raise arbitrary types
                self._services.remove(service)
                _log.error(
                    "%s failed and is disabled: %s; all values are in %s", service.name, error, self._metrics_path
                )

    def close(self) -> None:
        """Close all services. Further calls do nothing."""
        services, self._services = self._services, []
        for service in services:
            try:
                service.close()
            except Exception as error:  # services raise arbitrary types
                _log.error("closing %s failed: %s; all values are in %s", service.name, error, self._metrics_path)


def _package(section: str, package: str, pip_name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"stats_logger.{section}.mode requires the package {package}, which cannot be imported ({error}); "
            f"run `pip install {pip_name!r}`, or set stats_logger.{section}.mode=disabled (`areno train`: remove --track "
            f"{section})"
        ) from error


def _opened(section: str, opening: Callable[[], Any]) -> Any:
    """Call a function that opens a service or logs in to a service. Raises UsageError if the function fails."""
    try:
        return opening()
    except Exception as error:
        raise UsageError(
            f"{section} failed to start: {error}; check the login and the address of the service, or set "
            f"stats_logger.{section}.mode=disabled (`areno train`: remove --track {section})"
        ) from error


class _TrackedRun:
    """Sends numbers to a run of a tracking service.

    ``run`` is the run object of the service's Python package. ``next_step`` is a function that takes the last step sent to the
    service (-1 if no step has been sent), and returns the smallest step that the service accepts next.
    """

    def __init__(
        self,
        name: str,
        run: Any,
        next_step: Callable[[int], int] = lambda last: last + 1,
        accepts: Callable[[float], bool] = lambda value: True,
    ) -> None:
        self.name, self._run = name, run
        self._next_step, self._accepts = next_step, accepts
        self._step, self._sent = -1, -1  # the last step, and the step that the service received for it

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step != self._step:
            self._step, self._sent = step, max(step, self._next_step(self._sent))
        accepted = {name: value for name, value in numbers.items() if self._accepts(value)}
        self._run.log(accepted, step=self._sent)

    def close(self) -> None:
        self._run.finish()


class _SharedRun:
    """Sends numbers to a W&B run that several processes write to.

    W&B ignores the argument ``step`` for such a run, so the step is sent as a metric.
    """

    name = "W&B"

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({_SHARED_STEP: step, **numbers})

    def close(self) -> None:
        self._run.finish()


def _wandb(run: RunName, folder: Path, mode: str, section: WandBConfig) -> TrackingService:
    """Open a W&B run. If a run of areno is restarted, the W&B run is resumed; an offline W&B run cannot be resumed.

    Without ``wandb_api_key``, the W&B package uses the key in ``WANDB_API_KEY`` or the key that ``wandb login`` stored.
    """
    wandb = _package("wandb", "wandb", "wandb")
    settings = {"console": "off", "silent": True}  # do not capture the terminal output
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
    _log.info("opened the W&B run %s (mode %s)", opened.url or opened.dir, mode)
    if mode == "shared":
        opened.define_metric("*", step_metric=_SHARED_STEP)
        return _SharedRun(opened)
    # W&B completes a step when the next step starts. A resumed run starts after its history.
    return _TrackedRun("W&B", opened, lambda last: opened.step if last < 0 else last + 1)


def _swanlab(run: RunName, folder: Path, mode: str, section: SwanlabConfig) -> TrackingService:
    """Open a SwanLab run. Values that are not finite are not sent, because SwanLab does not accept these values.

    Without ``api_key``, the SwanLab package uses the key in ``SWANLAB_API_KEY`` or the key that ``swanlab login`` stored.
    """
    swanlab = _package("swanlab", "swanlab", "swanlab")
    if mode == "local":
        _package("swanlab", "swanboard", "swanlab[dashboard]")
    if mode == "cloud" and section.api_key:
        _opened("swanlab", lambda: swanlab.login(api_key=section.api_key))
    # Only the cloud can resume a run; locally, a restart creates a new run of the same name.
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
    return _TrackedRun("SwanLab", opened, accepts=math.isfinite)


def _trackio(run: RunName, folder: Path, mode: str, section: TrackioConfig) -> TrackingService:
    """Open a Trackio run in a Hugging Face Space, or in a local database in ``TRACKIO_DIR``."""
    if (mode == "online") != bool(section.space_id):
        raise UsageError(
            "stats_logger.trackio.mode=online requires a Hugging Face Space, but stats_logger.trackio.space_id is not set; "
            "set stats_logger.trackio.space_id=user/space"
            if mode == "online"
            else f"stats_logger.trackio.space_id={section.space_id} is set, but stats_logger.trackio.mode=local uses no "
            "Hugging Face Space; use stats_logger.trackio.mode=online"
        )
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
    # A resumed run exposes the length of its history only as its next automatic step.
    return _TrackedRun("Trackio", opened, lambda last: getattr(opened, "_next_step", 0) if last < 0 else last + 1)


class _MLflowRun:
    name = "MLflow"

    def __init__(self, client: Any, run_id: str, metric: Callable[..., Any]) -> None:
        self._client, self._run_id, self._metric = client, run_id, metric

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_mlflow_name(name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _mlflow(run: RunName, folder: Path, mode: str, section: MLflowConfig) -> TrackingService:
    """Open an MLflow run on a server or in a database such as ``sqlite:///mlflow.db``.

    If a run of areno is restarted, the MLflow run is found by its tag ``areno.run_id`` and resumed.
    """
    # By default MLflow retries an unreachable server for four minutes, while the training waits.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    mlflow = _package("mlflow", "mlflow", "mlflow")
    experiment, tag = section.experiment or run.experiment, run.run_id(None)

    def open_run() -> _MLflowRun:
        client = mlflow.MlflowClient(tracking_uri=section.tracking_uri)
        known = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if known is None else known.experiment_id
        earlier = client.search_runs([number], filter_string=f"tags.`areno.run_id` = '{tag}'", max_results=1)
        if earlier:
            client.update_run(earlier[0].info.run_id, status="RUNNING")
            return _MLflowRun(client, earlier[0].info.run_id, mlflow.entities.Metric)
        opened = client.create_run(number, run_name=section.name or run.trial, tags={"areno.run_id": tag})
        settings = [(name, value) for name, value in flat(run.config) if value is not None]
        params = [mlflow.entities.Param(_mlflow_name(name), str(value)) for name, value in settings]
        for start in range(0, len(params), 100):  # a server accepts no more at once
            client.log_batch(opened.info.run_id, params=params[start : start + 100])
        return _MLflowRun(client, opened.info.run_id, mlflow.entities.Metric)

    opened = _opened("mlflow", open_run)
    address = section.tracking_uri or mlflow.get_tracking_uri()
    _log.info("opened an MLflow run of experiment %s in %s", experiment, re.sub(r"://[^/@]*@", "://", address))
    return opened


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w./: -]", "_", name)
