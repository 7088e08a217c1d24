"""Whole runs of ``areno train --agent-fn``: algorithms, log lines, filters, failures, contents of the run directory."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest

from areno.cli.main import main
from tests.agentic.agents import THREE_TURNS, write_agent
from tests.agentic.stage import open_trainer
from tests.support.cli import task_arguments, write_task
from tests.support.loops import open_loop, step

TURN_REWARDS = """

async def run_agent(ctx, batch):
    def reward(number):
        return float(number)
    return await asyncio.gather(*(talk(ctx, item, 1 + item.sample_index % 3, reward=reward) for item in batch.iter_samples()))
"""
SOME_LONG = """

async def run_agent(ctx, batch):
    return await asyncio.gather(
        *(talk(ctx, item, 3 if item.sample_index == 1 else 1, "more " * 30) for item in batch.iter_samples())
    )
"""
ONE_FAILS = """

async def run_agent(ctx, batch):
    for item in batch.iter_samples():
        if item.sample_index == 0 and item.prompt_index < {bad}:
            raise ValueError("no luck today")
        yield await talk(ctx, item, 1)
"""
ALL_FAIL = """

async def run_agent(ctx, batch):
    for item in batch.iter_samples():
        raise ValueError("no luck today")
        yield
"""
SECOND_TRY = """
TRIED = set()


async def run_agent(ctx, batch):
    found = []
    for item in batch.iter_samples():
        place = (item.prompt_index, item.sample_index)
        if place == (0, 0) and place not in TRIED:
            TRIED.add(place)
            continue
        found.append(await talk(ctx, item, 1))
    return found
"""


@pytest.fixture
def train(tmp_path, tiny_checkpoint, capsys):
    """Runs ``areno train`` in this process; returns exit code, run directory and all output."""

    def run(algo, body, *options, rows=60):
        agent = write_agent(tmp_path, body)
        arguments = task_arguments(algo, tiny_checkpoint, write_task(tmp_path / "task", rows), tmp_path / "run")
        code = main([*map(str, arguments), "--agent-fn", str(agent), "--max-steps", "1", *map(str, options)])
        printed = capsys.readouterr()
        log = tmp_path / "run" / "log.txt"
        return code, tmp_path / "run", printed.out + printed.err + (log.read_text() if log.exists() else "")

    return run


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algo", [pytest.param("grpo", marks=pytest.mark.long), "gspo", "ppo"])
def test_every_policy_algorithm_trains_on_the_turns_of_agents(train, algo):
    options = ["--critic-warmup-steps", 0] if algo == "ppo" else []
    code, run, text = train(algo, THREE_TURNS, *options)
    assert code == 0
    [record] = metrics(run)
    assert record["train/logp_abs_diff_mean"] < 1e-5
    assert record["train/grad_norm"] > 0
    assert record["rollout/num_sequences"] == 24
    assert record["train/response_len"] == 15  # three turns of five tokens, without the prompts
    assert (record["train/agent_turns_mean"], record["train/agent_forks"], record["train/agent_failed"]) == (3, 0, 0)
    expected = "agentic rollout batch prompts=6 n_samples=4 expected_requests=24 max_running_prompts=24"
    assert expected in text
    match = re.search(
        r"agentic train batch built samples=24 tokens=(\d+) messages=144 tool_calls=0 tool_results=0", text
    )
    assert match
    assert int(match[1]) == round(record["rollout/seq_len_mean"] * 24)


def test_logged_trajectories_have_the_documented_fields(train, monkeypatch):
    monkeypatch.setenv("ARENO_LOG_COMPLETIONS", "2")
    _, _, text = train("grpo", THREE_TURNS)
    lines = [line for line in text.splitlines() if " completion prompt_idx=" in line and "INFO" in line]
    lines = lines[: len(lines) // 2] if len(lines) == 4 else lines  # logged to the console and the file
    assert len(lines) == 2
    for part in (
        "prompt='What is ", "decoded_prompt='<|user|>What is ", "messages=[{'role': 'user'", "final_answer=", "tool_calls=[]",
        "tool_results=[]", "loss_mask_true=15/", "first_loss_idx=", "loss_mask=[0, ", "tokens=[2, ",
    ):  # fmt: skip
        assert part in lines[0], part


def test_long_trajectories_are_filtered_and_reported(train):
    code, run, text = train("grpo", SOME_LONG, "--max-context-len", 90)
    assert code == 0
    line = next(line for line in text.splitlines() if "agentic trajectory filtered: " in line)
    match = re.search(
        r"max_context_len=90 total=24 kept=18 filtered=6 tokens\[min/p50/p90/max\]=(\d+)/(\d+)/(\d+)/(\d+) top=\[(.*)\]$",
        line,
    )
    assert match, line
    assert all(int(number) > 90 for number in match.groups()[:4])
    assert match[5].count("prompt_idx=") == 5
    for part in ("sample_idx=1 ", "tokens=", "messages=", "assistant_messages=", "tool_results=0", "response_tokens=",
                 "trace_events=", "prompt='What is "):  # fmt: skip
        assert part in match[5]
    [record] = metrics(run)
    assert record["rollout/num_sequences"] == 18
    assert record["train/agent_filtered_long"] == 6


def test_too_long_trajectories_of_rows_with_arrays_are_filtered(tmp_path, tiny_checkpoint):
    rows = [{"prompt": "What is shown?", "pixels": np.full(6, a)} for a in range(4)]
    options = {"agent_fn": str(write_agent(tmp_path, SOME_LONG)), "max_context_len": 90}
    with open_loop("grpo", tiny_checkpoint, tmp_path / "run", rows=rows, **options) as loop:
        outcome = step(loop)
    assert outcome.stats["agent_filtered_long"] == 4
    assert len(outcome.rows) == 8


def test_a_step_with_only_too_long_trajectories_names_the_option_to_raise(train):
    code, _, text = train("grpo", THREE_TURNS, "--max-context-len", 12)
    assert code == 1
    assert "longer than the context of 12 tokens; raise --max-context-len" in text


def test_failing_samples_are_logged_and_dropped_and_the_rest_is_trained_on(train):
    code, run, text = train("grpo", ONE_FAILS.format(bad=2))
    assert code == 0
    assert "a sample of the agent was dropped: prompt 0, sample 0: ValueError: no luck today" in text
    assert "a sample of the agent was dropped: prompt 1, sample 0: ValueError: no luck today" in text
    [record] = metrics(run)
    assert (record["rollout/num_sequences"], record["train/agent_failed"]) == (22, 2)


def test_too_many_failures_stop_the_run_with_the_errors(train):
    code, _, text = train("grpo", ONE_FAILS.format(bad=6), "--agent-max-failures", "0.2")
    assert code == 1
    assert "failed on 6 of 24 samples, more than --agent-max-failures 0.2 allows" in text
    assert "prompt 0, sample 0: ValueError: no luck today" in text


def test_a_step_whose_samples_all_fail_stops_the_run_whatever_the_limit(train):
    code, _, text = train("grpo", ALL_FAIL, "--agent-max-failures", "1")
    assert code == 1
    assert "failed on all 24 samples of this step:" in text


def test_a_sample_that_fails_once_is_retried(train):
    code, run, _ = train("grpo", SECOND_TRY)
    assert code == 0
    [record] = metrics(run)
    assert (record["rollout/num_sequences"], record["train/agent_failed"], record["train/agent_rerun"]) == (24, 0, 1)


def test_evaluation_runs_the_agent_on_held_out_prompts(train, tmp_path):
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("\n".join(json.dumps({"prompt": f"What is {a} plus 1?"}) for a in range(5)))
    code, run, _ = train("grpo", THREE_TURNS, "--eval-dataset-path", held_out, "--eval-n-samples", 2)
    assert code == 0
    evaluations = [record for record in metrics(run) if "eval/rewards_mean" in record]
    assert [record["step"] for record in evaluations] == [0, 1]
    assert {(r["eval/num_prompts"], r["eval/num_samples"], r["eval/response_len_mean"]) for r in evaluations} == {
        (5, 10, 15)
    }


def test_inspect_lists_samples_and_shows_one_token_by_token(train, capsys):
    _, run, _ = train("grpo", THREE_TURNS)
    assert main(["inspect", str(run)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].split() == ["sample", "reward", "advantage", "tokens", "rows", "answer"]
    names = [line.split()[0] for line in listed[1:]]
    assert "0/0/0" in names
    assert main(["inspect", str(run), "--sample", "0/0/0"]) == 0
    shown = capsys.readouterr().out
    kept = next(s for s in map(json.loads, (run / "samples.jsonl").read_text().splitlines()) if s["sample_index"] == 0)
    [row] = kept["rows"]
    trained = [segment for segment in row if segment["trained"]]
    assert [segment["turn"] for segment in trained] == [0, 1, 2]
    assert {segment["role"] for segment in trained} == {"text"}
    lines = [line.split() for line in shown.splitlines()]
    numbers = [(int(line[4]), float(line[5]), float(line[6])) for line in lines if line[3:4] == ["*"]]
    wanted = [
        (token, round(logprob, 4), round(advantage, 4))
        for segment in trained
        for token, logprob, advantage in zip(segment["tokens"], segment["logprobs"], segment["advantages"], strict=True)
    ]
    assert [token for token, _, _ in numbers] == [token for token, _, _ in wanted]
    assert numbers == pytest.approx([pytest.approx(one, abs=1e-4) for one in wanted])
    assert "'What is " in shown
    assert main(["inspect", str(run), "--sample", "0/0/0", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(shown.splitlines())


def test_inspect_explains_errors(train, tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    _, run, _ = train("grpo", THREE_TURNS)
    assert main(["inspect", str(run), "--sample", "7/0/0"]) == 2
    assert "--sample 7/0/0: this sample is not recorded" in capsys.readouterr().err


def test_turn_rewards_are_discounted_and_compared_turn_by_turn(tmp_path, tiny_checkpoint):
    agent = write_agent(tmp_path, TURN_REWARDS)
    rewards = iter([0.5, 1.0, 2.0] * 4)
    with open_loop(
        "grpo",
        tiny_checkpoint,
        tmp_path / "run",
        agent_fn=str(agent),
        turn_discount=0.5,
        reward=lambda _: next(rewards),
    ) as loop:
        outcome = step(loop)
    # Samples of a prompt have 1, 2 and 3 turns, with rewards 0, 1, 2; the reward function's is added to the last.
    turn_rewards = [[0.0], [0.0, 1.0], [0.0, 1.0, 2.0]]
    by_group: dict[int, list] = {}
    for row in outcome.rows:
        by_group.setdefault(row.group, []).append(row)
    assert len(by_group) == 4
    for rows in by_group.values():
        returns = []
        for own, row in zip(turn_rewards, rows, strict=True):
            own = [*own[:-1], own[-1] + row.reward]
            returns.append([sum(0.5 ** (j - k) * own[j] for j in range(k, len(own))) for k in range(len(own))])
        for place, row in enumerate(rows):
            advantages = [a for a, prompt in zip(row.advantages, row.prompt_mask, strict=True) if not prompt]
            assert len(advantages) == 5 * len(turn_rewards[place])
            for turn in range(len(turn_rewards[place])):
                peers = [own[turn] for own in returns if len(own) > turn]
                mean = sum(peers) / len(peers)
                deviation = (sum((value - mean) ** 2 for value in peers) / len(peers)) ** 0.5
                wanted = (returns[place][turn] - mean) / deviation if deviation else 0.0
                assert advantages[5 * turn : 5 * turn + 5] == pytest.approx([wanted] * 5, abs=1e-4)


TOOL_USER = """

async def run_agent(ctx, batch):
    return await asyncio.gather(*(use(ctx, item) for item in batch.iter_samples()))


async def use(ctx, item):
    async with openai.AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:
        messages, found = [{"role": "user", "content": item.prompt}], []
        for _ in range(2):
            response = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=4, extra_body={"ignore_eos": True}
            )
            found.append(AgentTrajectoryTurn(item=item, messages=list(messages), response=response))
            messages += [response.choices[0].message, {"role": "tool", "tool_call_id": "c", "content": "the plus is 17"}]
        return AgentTrajectory(found)
"""


def test_tool_results_are_trained_on_if_enabled_with_a_ratio_of_one(tmp_path, tiny_checkpoint):
    agent = write_agent(tmp_path, TOOL_USER)
    texts = []
    for trains in (False, True):
        options = {"agent_fn": str(agent), "train_tool_results": trains}
        with open_loop("grpo", tiny_checkpoint, tmp_path / f"run{trains}", **options) as loop:
            outcome = step(loop)
            decode = loop.instance.get_tokenizer().decode
        assert outcome.stats["logp_abs_diff_mean"] < 1e-5
        row = outcome.rows[0]
        marks = zip(row.tokens, row.logprobs, row.trainable(), strict=True)
        texts.append(decode([token for token, _, counts in marks if counts]))
        assert all(row.logprobs[place] < 0 for place, counts in enumerate(row.trainable()) if counts)
    assert "the plus is 17" not in texts[0]
    assert "the plus is 17" in texts[1]


def test_the_documented_programs_run(train, tmp_path, tiny_checkpoint):
    page = (Path(__file__).parents[2] / "docs" / "agentic.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text(blocks[0])
    code, run, _ = train("gspo", "", "--agent-fn", tmp_path / "page.py")
    assert code == 0
    assert metrics(run)[0]["train/agent_turns_mean"] == 3
    names: dict = {}
    exec(compile(blocks[0], "page", "exec"), names)
    exec(compile(blocks[2], "page", "exec"), names)
    with open_trainer(tiny_checkpoint) as trainer:
        [batch] = trainer.load_prompt_batches([{"prompt": "What is 1 plus 2?"}], batch_size=1, max_prompt_tokens=50)
        stats = asyncio.run(
            names["step"](trainer, batch, names["run_agent"], lambda record: float(len(record.messages)))
        )
    assert stats["grad_norm"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--agent-timeout-s", "0"], "--agent-timeout-s must be positive"),
        (["--agent-max-failures", "2"], "--agent-max-failures must be at most 1"),
        (["--agent-retries", "-1"], "--agent-retries must be non-negative"),
        (["--turn-discount", "1.5"], "--turn-discount must be at most 1"),
    ],
)
def test_invalid_values_are_refused(train, options, message):
    code, _, text = train("grpo", THREE_TURNS, *options)
    assert code == 2
    assert message in text


def test_agent_options_are_refused_without_an_agent(tmp_path, tiny_checkpoint, capsys):
    arguments = [*map(str, task_arguments("grpo", tiny_checkpoint, write_task(tmp_path / "task"), tmp_path / "run"))]
    for option in (["--train-tool-results"], ["--agent-timeout-s", "9"], ["--agent-retries", "2"],
                   ["--agent-max-failures", "1"], ["--turn-discount", "0.9"]):  # fmt: skip
        assert main([*arguments, *option]) == 2
        assert f"{option[0]}" in (text := capsys.readouterr().err)
        assert "has no effect without --agent-fn; set --agent-fn too" in text
    assert main([*arguments, "--agent-fn", "gone.py"]) == 2
    assert (
        "--agent-fn file does not exist: gone.py; pass a Python file that defines run_agent(ctx, batch)"
        in capsys.readouterr().err
    )
