"""``areno inspect``: what a run sampled and trained on, token by token, in the terminal.

It reads ``samples.jsonl`` alone, so it works beside a run that is still going on, and on a run of another machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areno.config.parser import TypedParser
from areno.errors import UsageError
from areno.observability.chart import printable
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import is_run

_SHOWN = 60
_GIVEN_TEXT = 400


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno inspect",
        description="Show the samples of a run: without --sample a list of them, with it one of them token by token, with "
        "the role of each token, whether it is trained on (*), its log-prob when it was sampled, and its advantage.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="The run directory.")
    parser.add_argument("--sample", metavar="ID", help="Which sample, as the list has it: STEP/PROMPT/SAMPLE.")
    parser.add_argument("--step", type=int, metavar="N", help="List the samples of this step only.")
    parser.add_argument("--all", action="store_true", help="Also show tokens one by one that were given to the model.")
    arguments = parser.parse_args(argv)
    samples = _read(arguments.run)
    if arguments.sample is None:
        lines = _list([one for one in samples if arguments.step in (None, one["step"])])
    else:
        lines = _show(_find(samples, arguments.sample), arguments.all)
    for line in lines:
        print(printable(line))  # a model may have written anything
    return 0


def _read(place: str) -> list[dict[str, Any]]:
    directory = RunDirectory(place)
    if not is_run(directory.path):
        raise UsageError(f"{place} is not a run directory; give the folder that holds config.yaml (runs/<name>)")
    samples = directory.read_samples()
    if not samples:
        raise UsageError(f"{directory.samples_path} has no samples: the run generates none, or has not done a step yet")
    return samples


def _id(sample: Mapping[str, Any]) -> str:
    return f"{sample['step']}/{sample['prompt_index']}/{sample['sample_index']}"


def _find(samples: Sequence[dict[str, Any]], wanted: str) -> dict[str, Any]:
    found = next((sample for sample in samples if _id(sample) == wanted), None)
    if found is None:
        raise UsageError(
            f"--sample {wanted}: there is no such sample; kept are {_id(samples[0])} to {_id(samples[-1])}, "
            "best, worst and first of each step's first prompts; leave --sample out to list them"
        )
    return found


def _list(samples: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'sample':<12}{'reward':>9}{'advantage':>11}{'tokens':>8}{'rows':>6}  answer"
    for sample in samples:
        advantage = "" if sample["advantage"] is None else f"{sample['advantage']:.3f}"
        rows = len(sample["rows"]) if "rows" in sample else "-"
        answer = " ".join(f"{_parts(sample)} {sample['completion']}".split())
        answer = answer if len(answer) <= _SHOWN else answer[: _SHOWN - 1] + "…"
        yield f"{_id(sample):<12}{sample['reward']:>9.3f}{advantage:>11}{sample['response_len']:>8}{rows:>6}  {answer}"


def _parts(sample: Mapping[str, Any]) -> str:
    """The parts of a sample's reward, in brackets; empty where it has none."""
    parts = ", ".join(f"{name} {part:g}" for name, part in sample.get("reward_parts", {}).items())
    return f" [{parts}]" if parts else ""


def _show(sample: Mapping[str, Any], every_token: bool) -> Iterator[str]:
    yield f"sample {_id(sample)}  reward {sample['reward']:g}{_parts(sample)}  finish {sample['finish_reason']}"
    if "rows" not in sample:
        yield "Its tokens were not kept: a step keeps those of its first samples only. The texts:"
        yield f"  prompt: {sample['prompt']!r}"
        yield f"  answer: {sample['completion']!r}"
        return
    for number, row in enumerate(sample["rows"]):
        tokens = [token for segment in row for token in segment["tokens"]]
        trained = sum(len(segment["tokens"]) for segment in row if segment["trained"])
        yield ""
        yield f"row {number + 1} of {len(sample['rows'])}: {len(tokens)} tokens, {trained} trained on"
        yield f"{'place':>6}  {'turn':>4} {'role':<10}  {'id':>7}  {'log-prob':>9}  {'advantage':>9}  {'version':>7}  text"
        place = 0
        for segment in row:
            yield from _segment(segment, place, every_token)
            place += len(segment["tokens"])


def _segment(segment: Mapping[str, Any], place: int, every_token: bool) -> Iterator[str]:
    turn = "-" if segment["turn"] < 0 else str(segment["turn"])
    mark = "*" if segment["trained"] else " "
    head = f"{turn:>4} {segment['role']:<10} {mark}"
    sampled = segment["version"] >= 0 or segment["role"] in ("text", "call")
    if not (sampled or segment["trained"] or every_token):
        text = "".join(segment["texts"])
        text = text if len(text) <= _GIVEN_TEXT else f"{text[: _GIVEN_TEXT // 2]} … {text[-_GIVEN_TEXT // 2 :]}"
        count = f"{len(segment['tokens'])} given"
        yield f"{place:>6}  {head}{count:>8}  {'':>9}  {'':>9}  {'':>7}  {text!r}"
        return
    version = "" if segment["version"] < 0 else str(segment["version"])
    columns = (segment["tokens"], segment["texts"], segment["logprobs"], segment["advantages"])
    for offset, (token, text, logprob, advantage) in enumerate(zip(*columns, strict=True)):
        numbers = f"{logprob:>9.4f}  {advantage:>9.4f}" if sampled or segment["trained"] else f"{'':>9}  {'':>9}"
        yield f"{place + offset:>6}  {head}{token:>8}  {numbers}  {version:>7}  {text!r}"
