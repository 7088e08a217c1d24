"""Writes tic-tac-toe boards as JSON lines.

python examples/agentic/tictactoe/dataset_generator.py --output boards.jsonl --count 256 --seed 2026
"""

from __future__ import annotations

from tictactoe import draw_record

from areno.api.agentic.environment import generate_records

if __name__ == "__main__":
    generate_records(
        draw_record,
        {
            "whole_games": "write early boards, from which games are played to the end against an opponent",
            "held_out": "write only held-out boards; files written without this option never contain them",
        },
    )
