"""Narrows the attention windows of a model.

With narrow windows, sequences of a few tokens suffice to test whether the layers of the model apply their windows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from areno.engine.limits import context_length

_WINDOWS = ("sliding_window", "attention_chunk_size")
_NARROW = 4


def limiting_window(config: Any) -> int | None:
    """Return the smallest attention window of a ``transformers`` configuration, in tokens; None if there is no window.

    Windows that are not shorter than the context are ignored.
    """
    text, context = config.get_text_config(), context_length(config)
    windows = [window for name in _WINDOWS if isinstance(window := getattr(text, name, None), int) and window > 0]
    return min((window for window in windows if context is None or window < context), default=None)


@contextmanager
def narrow_windows(module: nn.Module) -> Iterator[None]:
    """Within the ``with`` block, narrow the attention windows of a model to 4 tokens.

    The configuration is also changed, because ``transformers`` builds masks from the windows in the configuration.
    """
    text: Any = module.config.get_text_config()  # type: ignore[operator,union-attr]
    before: list[tuple[Any, str, int]] = []
    for name in _WINDOWS:
        window = getattr(text, name, None)
        if not isinstance(window, int) or window <= _NARROW:
            continue
        owners = [text, *(child for child in module.modules() if isinstance(getattr(child, name, None), int))]
        before += [(owner, name, getattr(owner, name)) for owner in owners]
        for owner in owners:  # a layer may count one token more or less than the configuration
            setattr(owner, name, getattr(owner, name) - window + _NARROW)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
