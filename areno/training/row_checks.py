"""What the first row of a data set lacks, told before a model is loaded; rows behind it are checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from areno.errors import DataError
from areno.text.data_rows import LOADER_OPTION, answer_of, response_of, text_or_messages
from areno.text.row_formats import pair_row, sft_row

Needs = Literal["prompt", "response", "pair"]


def row_problem(needs: Needs, row: Mapping[str, Any], source: str, loader: str = LOADER_OPTION) -> str:
    """Say why the first row of ``source`` cannot be used; empty if nothing speaks against it.

    Args:
        needs: ``prompt``, ``response`` (to a prompt) or ``pair`` (a chosen and a rejected answer).
        row: the first of the data.
        source: where it stands, for the message.
        loader: option or setting that brings rows into shape.
    """
    try:
        if needs == "pair":
            row = pair_row(row, with_template=True)
            answers = [answer_of(row, key, source, 0, loader) for key in ("chosen", "rejected")]
            if any(isinstance(answer, str) for answer in answers):
                text_or_messages(row, "prompt", source, 0, loader)
            return ""
        row = sft_row(row) if needs == "response" else row
        text_or_messages(row, "prompt", source, 0, loader)
        if needs == "response":
            response_of(row, source, 0, loader)
    except DataError as error:
        return str(error)
    return ""
