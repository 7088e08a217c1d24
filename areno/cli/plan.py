"""``areno plan``: estimates the memory of each phase of a run and suggests changes.

With ``--fit``, the command lists the parallel layouts in which a model fits into the memory of the given number of devices.
"""

import json
from collections.abc import Sequence

from areno.config.parser import PLAN, train_help
from areno.config.prepare import prepare_plan

TUNE = "--tune-params"
FIT = "--fit"


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    if FIT in argv:
        from areno.engine.plan.fit import run as fit

        return fit(argv)
    words = [word for word in argv if word != "--json"]
    if "-h" in argv or "--help" in argv:
        print(train_help(words, PLAN), end="")
        return 0
    if words and not words[0].startswith("-"):
        from areno.experiments.plan import plan_of_file

        settings = [word for word in words if word != TUNE]
        experiment, shown = plan_of_file(settings, as_data="--json" in argv, tune=TUNE in words)
        print(json.dumps(shown) if "--json" in argv else shown)
        return int(not experiment.fits)
    options = prepare_plan(words)
    from areno.engine.plan.memory_plan import make_plan
    from areno.engine.plan.table import plan_data, plan_text

    plan = make_plan(options)
    print(json.dumps(plan_data(options, plan)) if "--json" in argv else plan_text(options, plan))
    return int(not plan.fits)
