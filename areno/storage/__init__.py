"""Reads and writes the files of a run, such as its checkpoints, without importing torch.

- ``run_layout``: paths of ``areno train`` and ``areno run``, and the lookup of a run's newest model
- ``run_dir``: the files of a run directory
- ``run_lock``: one writer per run
- ``run_status``: how a run ended
- ``files``: opens and replaces files
- ``log_file``: sections of a log
- ``json_lines``: reads ``.jsonl`` files
- ``metric_columns``: ``metrics.jsonl`` as columns
- ``sample_index``: the index of ``samples.jsonl``
- ``checkpoint_folder``: writes checkpoints atomically, and deletes old checkpoints
- ``contents``: the state and the checksums of a checkpoint
- ``rollout_files``: saved training rows
- ``gguf``: GGUF files as checkpoint folders
"""
