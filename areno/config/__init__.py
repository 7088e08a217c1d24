"""Options, algorithm specs, validation and YAML. Does not import torch."""

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
