"""Generates free-text messages with orders to a bakery, each with the JSON object of its content.

    python examples/structured/make_data.py --output /tmp/orders

writes ``train.jsonl`` and ``heldout.jsonl``. Sentence forms, names and items of the held-out messages do not occur in
training, but counts and days do. Equal seeds give equal files, and a longer file begins with the rows of a shorter file.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "heldout"]

INSTRUCTION = "Turn the order into JSON."
EXAMPLES = (  # the examples show keys and types; their names and items occur nowhere else, so that copying them is never right
    ("Ann wants nine bread rolls on Monday.", {"name": "Ann", "count": 9, "item": "bread rolls", "day": "monday"}),
    ("Four oat cookies for Sunday, please. Tom", {"name": "Tom", "count": 4, "item": "oat cookies", "day": "sunday"}),
)
DAYS = ("Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
# At least 2, so that items are plural.
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Building blocks of the messages of one split. Forms have the placeholders
    ``{name}``, ``{count}``, ``{item}`` and ``{day}``."""

    forms: Sequence[str]
    names: Sequence[str]
    items: Sequence[str]


_OPENINGS = (
    "Hi, this is {name}. I need {count} {item}.",
    "Could {name} have {count} {item}?",
    "My name is {name} and I want to order {count} {item}.",
    "Do you have {count} {item} left? They are for {name}.",
    "We would love {count} of your {item}. Regards, {name}.",
    "Good evening! {count} {item}, if you can. Signed {name}.",
)
_REQUESTS = (
    "Please deliver them on {day}.",
    "Can you bring them to my house this {day}?",
    "I would like them next {day}.",
    "I will pick them up on {day}.",
    "Can I collect them on {day} after work?",
    "{day} would be fine.",
    "We eat them on {day}.",
    "I come by on {day} and take them with me.",
)
TRAIN = Vocabulary(
    forms=(
        *(f"{opening} {request}" for opening in _OPENINGS for request in _REQUESTS),
        "Could you deliver {count} {item} on {day}? This is {name}.",
        "{name} would like {count} {item}, delivered before {day}.",
        "Please bring {count} {item} to my house on {day}. Thanks, {name}",
        "Good morning! My name is {name}, please send {count} {item} to my office on {day}.",
        "We are having a party on {day} and need {count} {item}. {name}",
        "Hello, {name} speaking. Can you bring me {count} {item} this {day}?",
        "Order for {name}: {count} {item}, {day}.",
        "On {day} I cannot leave the house, so please deliver {count} {item}. Regards, {name}",
        "Do you deliver on {day}? Then I take {count} {item}. {name}",
        "By {day} we want you to send {count} {item} to {name}.",
        "Please put {count} {item} aside, I will fetch them on {day}. Thanks, {name}",
        "Are you open on {day}? Then I come by and take {count} {item}. {name}",
    ),
    names=(
        *("Anna", "Omar", "Lucy", "Peter", "Mia", "Carlos", "Emma", "David", "Fatima", "Paul", "Sarah", "Ahmed"),
        *("Laura", "Ben", "Maria", "James", "Helen", "Ravi", "Clara", "Daniel", "Amy", "George", "Rosa", "Kevin"),
    ),
    items=(
        *("muffins", "croissants", "bagels", "apple pies", "lemon tarts", "brownies", "cupcakes", "cinnamon buns"),
        *("donuts", "carrot cakes", "rye loaves", "cream puffs", "pancakes", "cherry pies", "cheese sticks"),
        *("almond cookies", "white loaves", "meat pies", "ginger cookies", "chocolate tarts", "sesame rings"),
    ),
)
HELD_OUT = Vocabulary(
    forms=(
        "Is it possible to have {count} {item} delivered {day} evening? The order is in the name of {name}.",
        "{name} here again, I am going to need {count} {item} and will pick them up {day} night.",
        "Your {item} were great! I want {count} more for {day}. Best, {name}",
        "Reserve {count} {item}, please. They are for {name}, who collects them when {day} comes.",
        "Dear baker, {count} {item} would make me happy. You can bring them to my flat this {day}. {name}",
        "My birthday is on {day}, so please keep {count} {item} ready, I will fetch them at noon. Yours, {name}",
        "Could somebody send {count} {item} to {name} until {day}?",
        "Can I come by for {count} {item} {day} afternoon? I am {name}.",
        "{name} is at home all {day} and waits for you to deliver {count} {item}.",
        "For {day}, put {name} on your list with {count} {item}, which I pick up myself.",
    ),
    names=("Nora", "Hassan", "Julia", "Victor", "Sofia", "Ivan", "Grace", "Leo", "Teresa", "Oscar", "Linda", "Simon"),
    items=("pretzels", "baguettes", "cheese cakes", "plum cakes", "scones", "waffles", "fruit tarts", "walnut cookies"),
)


def draw(split: Split, seed: int, index: int) -> dict[str, Any]:
    """Return row ``index`` of a split: ``prompt`` (chat messages), ``solutions``, ``response`` and ``form``.

    The reward uses ``solutions``, and SFT would use ``response``. Held-out forms are used in rotation, so that each form
    has the same weight.
    """
    words = HELD_OUT if split == "heldout" else TRAIN
    chance = random.Random(f"{seed}:{split}:{index}")
    form = words.forms[index % len(words.forms)] if split == "heldout" else chance.choice(words.forms)
    number = chance.randrange(len(NUMBERS))
    order = {"name": chance.choice(words.names), "count": number + 2, "item": chance.choice(words.items)}
    count = NUMBERS[number] if chance.random() < 0.5 else str(number + 2)
    day = chance.choice(DAYS)
    answer = compact({**order, "day": day.lower()})
    prompt = messages(form.format(**{**order, "count": count, "day": day}))
    return {"prompt": prompt, "solutions": [answer], "response": answer, "form": form}


def messages(order: str) -> list[dict[str, str]]:
    """Return the prompt for an order as a chat: instruction, two worked examples and the order."""
    turns = [{"role": "system", "content": INSTRUCTION}]
    for text, answer in EXAMPLES:
        turns += [{"role": "user", "content": text}, {"role": "assistant", "content": compact(answer)}]
    return [*turns, {"role": "user", "content": order}]


def compact(answer: dict[str, Any]) -> str:
    """Return JSON without spaces, which takes 20 % fewer tokens."""
    return json.dumps(answer, separators=(",", ":"))


def rows(split: Split, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Return the first ``count`` rows of a split."""
    return (draw(split, seed, index) for index in range(count))


def main(argv: Sequence[str] | None = None) -> None:
    """Write both files to the folder ``--output``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for train.jsonl and heldout.jsonl")
    parser.add_argument("--train-rows", type=int, default=4000, help="default: %(default)s")
    parser.add_argument("--held-out-rows", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    splits: tuple[tuple[Split, int], ...] = (("train", options.train_rows), ("heldout", options.held_out_rows))
    for split, count in splits:
        file = options.output / f"{split}.jsonl"
        lines = (json.dumps(row) + "\n" for row in rows(split, count, options.seed))
        file.write_text("".join(lines), encoding="utf-8")
        print(f"{count} rows in {file}")


if __name__ == "__main__":
    main()
