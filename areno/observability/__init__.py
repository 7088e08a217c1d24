"""Logs, metrics, traces, the terminal display and health warnings of a run.

- ``scalars``: names the metrics of a step of ``areno train``; ``log_lines``: the documented log lines.
- ``experiment_metrics``: the metrics of ``areno run`` by name, with their meaning.
- ``stats_collector``: collects the statistics of a step of ``areno run``, including those that your code records.
- ``stats_logger``: writes a step of ``areno run`` to the log, ``metrics.jsonl`` and tracking services.
- ``tracking_services``: TensorBoard, Weights & Biases, SwanLab, Trackio and MLflow; ``tensorboard``: the event files.
- ``train_metrics``: the meaning of each metric of ``areno train``; ``metric_advice``: normal values and remedies.
- ``samples``: which responses go to ``samples.jsonl``; ``health``: warnings when a run cannot learn.
- ``display``: progress on a terminal; ``screen``: its layout; ``chart``: text charts; ``logs``: logging of the command line.
- ``tracing``: the tracers of this process; ``perf_tracer``: timelines; ``session_tracer``: rollout sessions.
- ``step_memory``: the memory of a run, for its metrics; ``memory_profiler``: snapshots of GPU memory.
- ``environment`` and ``data_size``: the machine, the versions and the size of the data, for ``environment.json``.

Import only the submodules that you need. A command that only logs then starts fast. Importing a submodule does not
import torch.
"""
