"""Options, algorithm specs, validation and YAML. Does not import torch.

Options of ``areno train``:

- ``train_options``: all of them; ``run_options``, ``rollout_options``, ``update_options``: declared by group.
- ``policy_loss_options``: those of the policy loss, for algorithms that use it; ``effects``: options without effect.
- ``algorithms``: registry of algorithms; ``advantages``: registry of advantage estimators.
- ``prepare``: from arguments to a checked run; ``validate``: its checks; ``resume``: ``--resume``; ``summary``: its printout.

Options of other commands:

- ``eval_options`` (``areno eval``, ``export``); ``serve_options`` (``areno serve``, ``chat``).
- ``conversion``: settings of TRL and verl, for ``areno convert``; ``experiment``: the YAML of ``areno run``.

For all of them:

- ``options``: how an option is declared; ``parser``: flags and help; ``yaml_io``: YAML files.
- ``hooks``: users' functions from files; ``paths``: paths and hub references; ``splits``: splits of a dataset.
- ``machine``: defaults by device; ``packages``: optional packages; ``tracking``: tracking services.
- ``reward_weights``: weights of the parts of a reward.
"""

from areno.config.algorithms import AlgorithmSpec, get_algorithm, list_algorithms, register_algorithm
from areno.config.options import Option, OptionInfo, option, options_of
from areno.config.train_options import TrainOptions

__all__ = [
    "AlgorithmSpec",
    "Option",
    "OptionInfo",
    "TrainOptions",
    "get_algorithm",
    "list_algorithms",
    "option",
    "options_of",
    "register_algorithm",
]
