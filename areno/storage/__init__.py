"""On-disk state of a run: its directory and lock, checkpoints, and the path tables of both front ends. Does not import torch.

- ``run_layout``: paths of each front end, and a run's newest model; ``run_dir``: the files of a run directory.
- ``run_lock``: one writer per run; ``run_status``: how the run ended.
- ``files``: opens and replaces files; ``log_file``: sections of a log.
- ``json_lines``: reads ``.jsonl`` files; ``metric_columns``: ``metrics.jsonl`` as columns; ``sample_index``: the
  index of ``samples.jsonl``.
- ``checkpoint_folder``: folders of checkpoints, each complete or absent; keeps the newest N and deletes older ones.
- ``contents``: the state and the checksums of a checkpoint.
- ``rollout_files``: saved training rows.
- ``gguf``: GGUF files as checkpoint folders.
"""
