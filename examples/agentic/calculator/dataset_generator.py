"""Writes problems as JSON lines.

python examples/agentic/calculator/dataset_generator.py --output problems.jsonl --count 256
"""

from __future__ import annotations

from calculator import draw_record

from areno.api.agentic.environment import generate_records

if __name__ == "__main__":
    generate_records(draw_record, {"long": "write problems with four operations instead of two"})
