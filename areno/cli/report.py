"""``areno report``: writes the report of a run as one page, and prints its verdict."""

from collections.abc import Sequence

from areno.config.parser import TypedParser
from areno.observability.chart import printable
from areno.reports.evidence import Evidence
from areno.reports.report import write_report
from areno.reports.run_data import RunData
from areno.reports.verdict import verdict_of


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno report",
        description="Write the report of a run (report.html), even if the run is in progress or was killed, and print "
        "the verdict: whether the run learned, why it ended, what is wrong, and what to change.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="The run directory.")
    parser.add_argument("--out", metavar="FILE", help="Write to this file instead of RUN/report.html.")
    arguments = parser.parse_args(argv)
    data = RunData(arguments.run)
    evidence = Evidence(data)
    path = write_report(data, arguments.out, evidence)
    for line in verdict_of(data, evidence).lines():
        print(printable(line))  # names of reward parts and errors may contain control characters
    print(f"report: {path}")
    return 0
