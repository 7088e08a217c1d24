"""Options, algorithm specs, validation of options, and YAML files. The package does not import torch.

Options of ``areno train``:

- ``run_options``, ``rollout_options``, ``train_options``: options by group; ``all_train_options``: all of these options.
- ``policy_loss_options``: options of the policy loss, for algorithms that use it.
- ``effects``: finds the options that have no effect in a run.
- ``algorithms``: registry of algorithms; ``advantages``: registry of advantage estimators.
- ``prepare``: parses and checks the arguments of a run; ``validate``: checks of options; ``resume``: ``--resume``.
- ``summary``: the printed summary.

Options of other commands:

- ``eval_options`` (``areno eval``, ``export``); ``serve_options`` (``areno serve``, ``chat``).
- ``replayed`` (``areno replay``): the options of the recorded run, with changes.
- ``conversion``: ``areno convert``; ``conversion_tables``: the settings of TRL and verl.
- ``experiment``: the YAML files of ``areno run``.

For all commands:

- ``options``: how an option is declared; ``parser``: parsing of flags and values, and help; ``yaml_io``: YAML files.
- ``hooks``: user-defined functions from files; ``paths``: paths and hub references; ``splits``: splits of a dataset.
- ``machine``: defaults that depend on the machine; ``packages``: optional packages; ``tracking``: tracking services.
- ``secrets``: masking of secrets.
- ``reward_weights``: weights of the parts of a reward.
- ``setting_names``: translates options of ``areno train`` in messages to settings of ``areno run``.
- ``saved_rollouts``: the number of steps whose training rows are saved.
"""

from areno.config.algorithms import AlgorithmSpec, get_algorithm, list_algorithms, register_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.options import Option, OptionInfo, option, options_of

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
