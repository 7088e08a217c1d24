"""Writes shopping tasks as JSON lines.

python examples/agentic/shopping/dataset_generator.py --output tasks.jsonl --count 256
"""

from __future__ import annotations

from shopping import draw_record

from areno.api.agentic.environment import generate_records

if __name__ == "__main__":
    generate_records(draw_record)
