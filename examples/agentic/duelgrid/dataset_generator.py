"""Writes starting positions of duels as JSON lines.

python examples/agentic/duelgrid/dataset_generator.py --count 256 --output duels.jsonl
"""

from __future__ import annotations

from scenarios import draw_record

from areno.api.agentic.environment import generate_records

if __name__ == "__main__":
    generate_records(draw_record)
