"""Options, algorithm specs, validation and YAML. The package does not import torch.

Options of ``areno train``:

- ``train_options``: all options; ``run_options``, ``rollout_options``, ``update_options``: the declarations by group.
- ``policy_loss_options``: options of the policy loss, for algorithms that use it; ``effects``: options without effect.
- ``algorithms``: registry of algorithms; ``advantages``: registry of advantage estimators.
- ``prepare``: from arguments to a checked run; ``validate``: checks; ``resume``: ``--resume``; ``summary``: the printed
  summary.

Options of other commands:

- ``eval_options`` (``areno eval``, ``export``); ``serve_options`` (``areno serve``, ``chat``).
- ``replayed`` (``areno replay``): those of the run, with changes.
- ``conversion``: settings of TRL and verl, for ``areno convert``; ``experiment``: the YAML of ``areno run``.

For all of them:

- ``options``: how an option is declared; ``parser``: flags and help; ``yaml_io``: YAML files.
- ``hooks``: users' functions from files; ``paths``: paths and hub references; ``splits``: splits of a dataset.
- ``machine``: defaults by device; ``packages``: optional packages; ``tracking``: tracking services; ``secrets``: masks them.
- ``reward_weights``: weights of the parts of a reward; ``setting_names``: which setting corresponds to an option.
- ``saved_rollouts``: how many steps keep their rows.
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
