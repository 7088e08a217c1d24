"""``areno inspect``: lists the samples of a run, or shows the conversation and the tokens of one sample.

The command reads only the run directory, and needs neither model nor tokenizer. The run may be in progress, or come from
another machine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areno.config.parser import TypedParser
from areno.errors import UsageError
from areno.observability.chart import printable
from areno.observability.samples import PICKED_PROMPTS, bounded
from areno.reports.run_data import RunData
from areno.reports.run_samples import sample_id
from areno.storage.sample_index import Entries

_ANSWER_WIDTH = 60
_CONTEXT_WIDTH = 400
_MESSAGE_WIDTH = 2000
_NEWEST = 100  # samples that are listed by default


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno inspect",
        description="List the newest samples of a run, or show one sample (--sample): its conversation, if recorded, and "
        "its tokens. Each token that was sampled or trained on is shown with its role, log-prob at sampling time and "
        "advantage; * marks tokens that were trained on.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="The run directory.")
    parser.add_argument(
        "--sample", metavar="ID", help="Show this sample. The ID is STEP/PROMPT/SAMPLE, as in the list of samples."
    )
    parser.add_argument("--step", type=int, metavar="N", help="List the samples of this step only.")
    parser.add_argument(
        "--limit", type=int, metavar="N", default=_NEWEST, help="Number of samples to list (default: %(default)s)."
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="Also list the tokens of the model's input one by one, and show long messages in full.",
    )
    arguments = parser.parse_args(argv)
    if arguments.limit < 1:
        raise UsageError(f"--limit must be at least 1, got {arguments.limit}")
    data = RunData(arguments.run)
    entries = data.entries
    if not len(entries):
        raise UsageError(f"{data.path} has no samples: the run generates none, or has not finished a step yet")
    if arguments.sample is not None:
        lines = _show(data.sample(_find(entries, arguments.sample)), arguments.all)
    else:
        chosen = entries if arguments.step is None else entries[entries["step"] == arguments.step]
        if not len(chosen):
            raise UsageError(
                f"--step {arguments.step}: {data.path} has no samples of this step; it has samples of steps "
                f"{entries['step'].min()} to {entries['step'].max()}"
            )
        lines = _list(data, chosen[-arguments.limit :], len(chosen))
    for line in lines:
        print(printable(line))  # model output may contain control characters
    return 0


def _find(entries: Entries, name: str) -> Any:
    numbers = name.split("/")
    if len(numbers) == 3 and all(part.isdecimal() for part in numbers):
        step, prompt, sample = map(int, numbers)
        places = np.flatnonzero(
            (entries["step"] == step) & (entries["prompt"] == prompt) & (entries["sample"] == sample)
        )
        if len(places):
            return entries[places[0]]
    raise UsageError(
        f"--sample {name}: this sample is not recorded; a run records at most three samples per prompt (the best, the worst "
        f"and the first), and only for the first {PICKED_PROMPTS} prompts of a step; omit --sample to list the "
        f"recorded samples ({sample_id(entries[0])} to {sample_id(entries[-1])})"
    )


def _list(run: RunData, entries: Entries, total: int) -> Iterator[str]:
    yield f"{'sample':<12}{'reward':>9}{'advantage':>11}{'tokens':>8}{'rows':>6}  answer"
    for entry in entries:
        sample = run.sample(entry)
        advantage = "" if sample["advantage"] is None else f"{float(sample['advantage']):.3f}"
        rows = len(sample["rows"]) if "rows" in sample else "-"
        answer = " ".join(f"{_parts(sample)} {sample['completion']}".split())
        answer = answer if len(answer) <= _ANSWER_WIDTH else answer[: _ANSWER_WIDTH - 1] + "…"
        yield f"{sample_id(entry):<12}{entry['reward']:>9.3f}{advantage:>11}{sample['response_len']:>8}{rows:>6}  {answer}"
    if len(entries) < total:
        yield f"the newest {len(entries)} of {total} samples; --limit lists more, and --step lists the samples of one step"


def _parts(sample: Mapping[str, Any]) -> str:
    """Return the parts of a sample's reward as text, such as " [format 1, math 0.5]"; "" if the reward has no parts."""
    parts = ", ".join(f"{name} {float(part):g}" for name, part in sample.get("reward_parts", {}).items())
    return f" [{parts}]" if parts else ""


def _show(sample: Mapping[str, Any], every_token: bool) -> Iterator[str]:
    name = f"{sample['step']}/{sample['prompt_index']}/{sample['sample_index']}"
    yield f"sample {name}  reward {float(sample['reward']):g}{_parts(sample)}  finish {sample['finish_reason']}"
    yield from _conversation(sample.get("messages") or (), every_token)
    if "rows" not in sample:
        yield "The tokens of this sample were not saved (a run saves tokens only for the first samples of a step). Its text:"
        yield f"  prompt: {sample['prompt']!r}"
        yield f"  answer: {sample['completion']!r}"
        return
    for number, row in enumerate(sample["rows"]):
        tokens = [token for segment in row for token in segment["tokens"]]
        trained = sum(len(segment["tokens"]) for segment in row if segment["trained"])
        yield ""
        yield f"row {number + 1} of {len(sample['rows'])}: {len(tokens)} tokens, {trained} trained on"
        yield f"{'pos':>6}  {'turn':>4} {'role':<10}  {'id':>7}  {'log-prob':>9}  {'advantage':>9}  {'version':>7}  text"
        position = 0
        for segment in row:
            yield from _segment(segment, position, every_token)
            position += len(segment["tokens"])


def _conversation(messages: Sequence[Mapping[str, Any]], in_full: bool) -> Iterator[str]:
    """Show messages as turns, with tool calls and their results."""
    if messages:
        yield ""
        yield f"conversation of {len(messages)} messages"
    for message in messages:
        label = str(message.get("role"))
        texts = [_content(message.get("reasoning_content")), _content(message.get("content"))]
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            texts.append(f"calls {function.get('name')}({function.get('arguments')})")
        if label == "tool" and message.get("name"):
            texts.insert(0, f"{message['name']} returns")
        text = "\n".join(filter(None, texts)) or "(empty)"
        lines = (text if in_full else bounded(text, _MESSAGE_WIDTH)).splitlines()
        yield from (f"  {label if number == 0 else '':<10} {line}" for number, line in enumerate(lines))


def _content(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "\n".join(
            part["text"] if isinstance(part, dict) and "text" in part else json.dumps(part, ensure_ascii=False)
            for part in content
        )
    return "" if content is None else str(content)


def _segment(segment: Mapping[str, Any], position: int, every_token: bool) -> Iterator[str]:
    turn = "-" if segment["turn"] < 0 else str(segment["turn"])
    head = f"{turn:>4} {segment['role']:<10} {'*' if segment['trained'] else ' '}"
    sampled = segment["version"] >= 0 or segment["role"] in ("text", "call")
    if not (sampled or segment["trained"] or every_token):
        text = "".join(segment["texts"])
        count = f"{len(segment['tokens'])} ctx"
        yield f"{position:>6}  {head}{count:>8}  {'':>9}  {'':>9}  {'':>7}  {bounded(text, _CONTEXT_WIDTH)!r}"
        return
    version = "" if segment["version"] < 0 else str(segment["version"])
    columns = (segment["tokens"], segment["texts"], segment["logprobs"], segment["advantages"])
    for offset, (token, text, logprob, advantage) in enumerate(zip(*columns, strict=True)):
        # `float`, because NaN and infinities are strings in the file
        shown = f"{float(logprob):>9.4f}  {float(advantage):>9.4f}" if sampled or segment["trained"] else " " * 20
        yield f"{position + offset:>6}  {head}{token:>8}  {shown}  {version:>7}  {text!r}"
