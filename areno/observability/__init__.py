"""Logs, metrics, traces, the terminal display and health warnings of a run.

- ``scalars``: collects the metrics of a step of ``areno train``; ``log_lines``: defines the documented log lines.
- ``experiment_metrics``: lists the metrics of ``areno run`` with their meanings.
- ``stats_collector``: collects the statistics of a step of ``areno run``, including statistics from your own code.
- ``stats_logger``: writes a step of ``areno run`` to the log, ``metrics.jsonl`` and tracking services.
- ``tracking_services``: TensorBoard, Weights & Biases, SwanLab, Trackio and MLflow; ``tensorboard``: the event files.
- ``train_metrics``: the meaning of each metric of ``areno train``; ``metric_advice``: normal values and remedies.
- ``samples``: selects the responses for ``samples.jsonl``; ``health``: warns when a run cannot learn.
- ``display``: shows progress on a terminal; ``screen``: lays out the display; ``chart``: draws text charts.
- ``logs``: sets up logging for the command line.
- ``tracing``: the tracers of the process; ``perf_tracer``: records timelines; ``session_tracer``: rollout sessions.
- ``step_memory``: measures memory for the metrics; ``memory_profiler``: takes snapshots of GPU memory.
- ``environment`` and ``data_size``: the machine, the versions and the size of the data, for ``environment.json``.

Import a submodule only where it is needed, so that commands start fast. Importing a submodule does not import torch.
"""
