"""``areno diff``: shows how two runs differ, finds the first step that differs, and lists possible causes."""

import json
from collections.abc import Sequence

from areno.config.parser import TypedParser
from areno.observability.chart import printable


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno diff",
        description="Compare two runs: settings, environment and curves. Show the first step that differs, and the first "
        "phase of this step that differs (prompts, sampled tokens, log-probs, rewards, advantages, update). The runs may "
        "come from `areno train` or `areno run`. The exit code is 0 if both runs have the same number of "
        "steps, the same results, and the same values of all settings that may change results. Otherwise, the exit code is 1.",
        allow_abbrev=False,
    )
    parser.add_argument("first", metavar="RUN", help="A run directory.")
    parser.add_argument("second", metavar="RUN", help="Another run directory.")
    parser.add_argument("--json", action="store_true", help="Print the comparison as JSON.")
    arguments = parser.parse_args(argv)
    from areno.reports.compare import compare_runs
    from areno.reports.comparison_text import comparison_text
    from areno.reports.run_data import RunData
    from areno.storage.run_dir import json_safe

    comparison = compare_runs(RunData(arguments.first), RunData(arguments.second))
    if arguments.json:
        print(json.dumps(json_safe(comparison.as_data()), indent=2))
    else:
        for line in comparison_text(comparison):
            print(printable(line))  # prompts may contain control characters
    return int(not comparison.equal)
