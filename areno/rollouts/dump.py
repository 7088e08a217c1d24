"""Writes trajectories to JSON Lines files, one line per training row and one folder per weight version."""

import json
from pathlib import Path
from typing import Any

from areno.rollouts.trajectory import Trajectory, reward_of, samples_of
from areno.types import parts_of


class TrajectoryDump:
    """Writes each trajectory to ``{folder}/{tail_version}/{task_id}.jsonl``. Decoded texts include special tokens.

    ``tail_version`` is the weight version of the last sampled token. See :meth:`write` for trajectories with several rows.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder, self._tokenizer = Path(folder), tokenizer

    def write(self, task_id: int, trajectory: Trajectory) -> Path:
        """Write one group of samples, and return the path of the file.

        Each line has the keys ``task_id``, ``sample_idx``, ``seqlen``, ``reward``, ``prompt``, ``completion``, and these keys:

        - ``prompt_len``: number of tokens before the first sampled token.
        - ``head_version`` and ``tail_version``: weight versions of the first and the last sampled token.
        - ``reward_parts``: the parts of the reward, if there are any.

        The folder is named after the newest ``tail_version`` of the group.
        """
        lines = [self._line(task_id, index, row) for index, row in enumerate(samples_of(trajectory))]
        path = self.folder / str(max(line["tail_version"] for line in lines)) / f"{task_id}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        return path

    def _line(self, task_id: int, index: int, row: dict[str, Any]) -> dict[str, Any]:
        tokens, versions = row["input_ids"], row["versions"]
        sampled = [index for index, version in enumerate(versions) if version >= 0]
        begin = sampled[0] if sampled else len(versions)
        return {
            "task_id": task_id,
            "sample_idx": index,
            "seqlen": len(tokens),
            "prompt_len": begin,
            "head_version": versions[sampled[0]] if sampled else -1,
            "tail_version": versions[sampled[-1]] if sampled else -1,
            "reward": row["rewards"],
            **({"reward_parts": dict(parts)} if (parts := parts_of(reward_of(row))) else {}),
            "prompt": self._tokenizer.decode(tokens[:begin]),
            "completion": self._tokenizer.decode(tokens[begin:]),
        }
