"""``areno inspect``: shows what a run sampled and trained on, token by token.

It only reads ``samples.jsonl``, so it works on a run in progress and on a run of another machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areno.config.parser import TypedParser
from areno.errors import UsageError
from areno.observability.chart import printable
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import is_run

_ANSWER_WIDTH = 60
_CONTEXT_WIDTH = 400


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno inspect",
        description="List the samples of a run, or show one of them (--sample) token by token: the role of each token, "
        "whether it is trained on (*), its log-prob at sampling time, and its advantage.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="The run directory.")
    parser.add_argument("--sample", metavar="ID", help="Sample to show, as listed: STEP/PROMPT/SAMPLE.")
    parser.add_argument("--step", type=int, metavar="N", help="List the samples of this step only.")
    parser.add_argument("--all", action="store_true", help="Show context tokens one by one too.")
    arguments = parser.parse_args(argv)
    samples = _read(arguments.run)
    if arguments.sample is None:
        lines = _list([sample for sample in samples if arguments.step in (None, sample["step"])])
    else:
        lines = _show(_find(samples, arguments.sample), arguments.all)
    for line in lines:
        print(printable(line))  # model output may contain control characters
    return 0


def _read(run: str) -> list[dict[str, Any]]:
    directory = RunDirectory(run)
    if not is_run(directory.path):
        raise UsageError(f"{run} is not a run directory; pass the folder that contains config.yaml (runs/<name>)")
    samples = directory.read_samples()
    if not samples:
        raise UsageError(
            f"{directory.samples_path} has no samples: the run generates none, or has not finished a step yet"
        )
    return samples


def _id(sample: Mapping[str, Any]) -> str:
    return f"{sample['step']}/{sample['prompt_index']}/{sample['sample_index']}"


def _find(samples: Sequence[dict[str, Any]], sample_id: str) -> dict[str, Any]:
    for sample in samples:
        if _id(sample) == sample_id:
            return sample
    raise UsageError(
        f"--sample {sample_id}: no such sample; the run has {_id(samples[0])} to {_id(samples[-1])} (the best, worst and "
        "first of each step's first prompts); omit --sample to list them"
    )


def _list(samples: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'sample':<12}{'reward':>9}{'advantage':>11}{'tokens':>8}{'rows':>6}  answer"
    for sample in samples:
        advantage = "" if sample["advantage"] is None else f"{sample['advantage']:.3f}"
        rows = len(sample["rows"]) if "rows" in sample else "-"
        answer = " ".join(f"{_parts(sample)} {sample['completion']}".split())
        answer = answer if len(answer) <= _ANSWER_WIDTH else answer[: _ANSWER_WIDTH - 1] + "…"
        yield f"{_id(sample):<12}{sample['reward']:>9.3f}{advantage:>11}{sample['response_len']:>8}{rows:>6}  {answer}"


def _parts(sample: Mapping[str, Any]) -> str:
    """Format the parts of a sample's reward in brackets; empty if it has none."""
    parts = ", ".join(f"{name} {part:g}" for name, part in sample.get("reward_parts", {}).items())
    return f" [{parts}]" if parts else ""


def _show(sample: Mapping[str, Any], every_token: bool) -> Iterator[str]:
    yield f"sample {_id(sample)}  reward {sample['reward']:g}{_parts(sample)}  finish {sample['finish_reason']}"
    if "rows" not in sample:
        yield "Its tokens were not saved (a step saves those of its first samples only). The text:"
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


def _segment(segment: Mapping[str, Any], position: int, every_token: bool) -> Iterator[str]:
    turn = "-" if segment["turn"] < 0 else str(segment["turn"])
    head = f"{turn:>4} {segment['role']:<10} {'*' if segment['trained'] else ' '}"
    sampled = segment["version"] >= 0 or segment["role"] in ("text", "call")
    if not (sampled or segment["trained"] or every_token):
        text = "".join(segment["texts"])
        text = (
            text if len(text) <= _CONTEXT_WIDTH else f"{text[: _CONTEXT_WIDTH // 2]} … {text[-_CONTEXT_WIDTH // 2 :]}"
        )
        count = f"{len(segment['tokens'])} ctx"
        yield f"{position:>6}  {head}{count:>8}  {'':>9}  {'':>9}  {'':>7}  {text!r}"
        return
    version = "" if segment["version"] < 0 else str(segment["version"])
    columns = (segment["tokens"], segment["texts"], segment["logprobs"], segment["advantages"])
    for offset, (token, text, logprob, advantage) in enumerate(zip(*columns, strict=True)):
        numbers = f"{logprob:>9.4f}  {advantage:>9.4f}" if sampled or segment["trained"] else f"{'':>9}  {'':>9}"
        yield f"{position + offset:>6}  {head}{token:>8}  {numbers}  {version:>7}  {text!r}"
