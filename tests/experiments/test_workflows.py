"""Rewards, multi-turn episodes, and what users may name as a workflow."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.config.experiment.generation_sections import AgentConfig
from areno.config.hooks import named_function
from areno.errors import RewardError, UsageError
from areno.loss_fns.gae import discounted_returns
from areno.rollouts.conversation.trajectory_rows import TrajectoryRow
from areno.rollouts.dispatcher import BatchDispatcher
from areno.rollouts.engine_client import EngineClient
from areno.rollouts.staleness import StalenessManager
from areno.rollouts.tasks import RolloutStoppedError
from areno.rollouts.trajectory import check_trajectory, make_trajectory, samples_of, train_sequences
from areno.rollouts.workflows.base import RolloutWorkflow, as_trajectory
from areno.rollouts.workflows.multi_turn import TRY_AGAIN, MultiTurnWorkflow
from areno.rollouts.workflows.resolve import resolve_workflow
from areno.rollouts.workflows.rewards import AsyncReward
from areno.rollouts.workflows.rlvr import RLVRWorkflow
from areno.types import parts_of
from tests.experiments.stage import Generation

ROW = {"prompt": "What is 2 plus 2?", "answer": "4"}


def first_digit(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(len(prompt_ids) * 100 + len(completion_ids) + int(data["answer"]) / 10)


def broken(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    raise ValueError(f"cannot read {data['answer']}")


def call(reward: AsyncReward, **data: Any) -> float:
    async def main() -> float:
        try:
            return await reward("p", "c", [1, 2, 3], [4, 5], **data)
        finally:
            reward.close()

    return asyncio.run(main())


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_a_reward_function_gets_texts_tokens_and_the_row():
    assert call(AsyncReward(first_digit), answer="7", prompt="in the row") == 302.7


def test_reward_functions_may_be_closures_names_files_or_coroutines(tmp_path: Path):
    factor = 3.0
    assert call(AsyncReward(lambda *texts, **data: factor * len(texts[0]))) == 3.0
    assert call(AsyncReward("tests.experiments.plain_rewards.letters")) == 9 % 7 / 7
    (tmp_path / "mine.py").write_text(
        "import asyncio\nasync def reward(prompt, completions, prompt_ids, completion_ids, **data):\n"
        "    await asyncio.sleep(0)\n    return sum(completion_ids)\n"
    )
    assert call(AsyncReward(f"{tmp_path}/mine.py:reward")) == 9.0
    loaded = named_function(f"{tmp_path}/mine.py:reward", option="reward_fn")
    assert call(AsyncReward(loaded)) == 9.0  # from a module that no other process could import
    assert call(AsyncReward(functools.partial(first_digit), max_workers=2), answer="7") == 302.7


def test_a_reward_function_without_a_worker_is_refused():
    with pytest.raises(UsageError, match="max_workers must be at least 1, got 0"):
        AsyncReward(first_digit, max_workers=0)


def test_an_exception_in_a_reward_function_is_an_error_and_not_zero():
    with pytest.raises(
        RewardError, match=r"test_workflows\.broken failed: ValueError: cannot read 7 \(.*test_workflows\.py:"
    ):
        call(AsyncReward(broken), answer="7")


def test_a_reward_that_times_out_is_killed_with_its_children_and_retried(tmp_path: Path):
    pids = tmp_path / "pids"

    def slow(*_: Any, **data: Any) -> float:
        import os
        import subprocess
        import sys
        import time

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(data["pids"], "a") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
        while True:
            time.sleep(1000)

    with pytest.raises(RewardError, match=r"failed \(3 times\): no result within 0.5 s"):
        call(AsyncReward(slow, timeout_seconds=0.5, max_retries=2), pids=str(pids))
    tries = [[int(pid) for pid in line.split()] for line in pids.read_text().splitlines()]
    assert len(tries) == 3
    assert all(gone(pid) for pids in tries for pid in pids)


def test_a_reward_whose_process_dies_is_retried(tmp_path: Path):
    def dies_once(*_: Any, **data: Any) -> float:
        import os
        from pathlib import Path

        if not Path(data["mark"]).exists():
            Path(data["mark"]).touch()
            os.kill(os.getpid(), 9)
        return 5.0

    assert call(AsyncReward(dies_once), mark=str(tmp_path / "mark")) == 5.0


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


def test_a_run_with_a_broken_reward_function_stops_and_shows_it(engine):
    workflow = resolve_workflow(RLVRWorkflow(broken, Generation(), engine.tokenizer), Generation(), n_samples=2)
    with (
        BatchDispatcher(
            EngineClient(engine), StalenessManager(consumer_batch_size=2), max_errors_in_a_row=4
        ) as dispatcher,
        pytest.raises(RolloutStoppedError, match=r"(?s)4 raised.*The first exception was.*ValueError: cannot read 4"),
    ):
        dispatcher.prepare_batch(iter([ROW] * 100), workflow)


# -- several turns -----------------------------------------------------------------------------------------------------


def episode(engine: Any, workflow: RolloutWorkflow, data: dict[str, Any] = ROW) -> Any:
    async def main() -> Any:
        try:
            return await workflow.arun_episode(EngineClient(engine, seed=2), data)
        finally:
            await workflow.aclose()

    return asyncio.run(main())


def third_try(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return 8.0 if prompt.count("answer the original") == 2 else 0.0


def test_a_wrong_answer_is_retried_and_discounted(engine):
    gconfig = Generation(max_new_tokens=6, ignore_eos=False)
    found = episode(engine, MultiTurnWorkflow(third_try, gconfig, engine.tokenizer, max_turns=5, turn_discount=0.5))
    check_trajectory(found)
    assert found["rewards"].tolist() == [8.0 * 0.5**2] * len(found["rewards"])
    assert set(found["num_turns"].tolist()) == {3}
    for row in samples_of(found):  # exactly the sampled tokens are trained on
        assert [bool(mark) for mark in row["loss_mask"]] == [version >= 0 for version in row["versions"]]
    texts = [engine.tokenizer.decode(row["input_ids"]) for row in samples_of(found)]
    assert any(text.count(TRY_AGAIN) == 2 for text in texts)


def test_a_discount_applies_to_the_parts_of_a_reward_too(engine):
    gconfig = Generation(max_new_tokens=4)

    def parts(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> Any:
        again = TRY_AGAIN in prompt
        return {"right": 4.0 * again, "tidy": 2.0 * again}

    reward = AsyncReward(parts, weights={"tidy": 0.5})
    found = episode(engine, MultiTurnWorkflow(reward, gconfig, engine.tokenizer, max_turns=3, turn_discount=0.5))
    check_trajectory(found)
    for row, sequence in zip(samples_of(found), train_sequences([found], 0), strict=True):
        assert (row["rewards"], row["reward_parts/right"], row["reward_parts/tidy"]) == (2.5, 2.0, 1.0)
        assert (sequence.reward, parts_of(sequence.reward)) == (2.5, {"right": 2.0, "tidy": 1.0})


def test_attempts_end_at_the_limit_with_reward_zero(engine):
    gconfig = Generation(max_new_tokens=4)
    found = episode(engine, MultiTurnWorkflow(lambda *_, **__: 0.0, gconfig, engine.tokenizer, max_turns=2))
    assert set(found["rewards"].tolist()) == {0.0}
    assert set(found["num_turns"].tolist()) == {2}


def test_a_full_context_ends_the_conversation_and_keeps_it(engine):
    gconfig = Generation(max_new_tokens=20, max_tokens=60)
    found = episode(engine, MultiTurnWorkflow(lambda *_, **__: 0.0, gconfig, engine.tokenizer, max_turns=50))
    assert found["num_turns"][0] < 50
    assert found["input_ids"].shape[1] <= 60


# -- trajectories ------------------------------------------------------------------------------------------------------


@st.composite
def rows(draw: Any) -> TrajectoryRow:
    kinds = [False, *draw(st.lists(st.booleans(), min_size=1, max_size=12))]
    trained = [sampled and draw(st.booleans()) for sampled in kinds]
    return TrajectoryRow(
        tokens=draw(st.lists(st.integers(0, 99), min_size=len(kinds), max_size=len(kinds))),
        sampled=kinds,
        trained=trained,
        turns=[0] * len(kinds),
        logprobs=[-draw(st.integers(1, 64)) / 8 if sampled else 0.0 for sampled in kinds],
        versions=[draw(st.integers(0, 9)) if sampled else -1 for sampled in kinds],
        temperature=draw(st.sampled_from([1.0, 0.5])),
        truncated=draw(st.booleans()),
        roles=list,
    )


@given(groups=st.lists(st.lists(st.tuples(rows(), st.integers(-4, 4)), min_size=1, max_size=4), min_size=1, max_size=3))
def test_rows_survive_padding_and_keep_their_group(groups):
    """Rows are unchanged by padding into tensors and back; padding marks none of them as truncated, whatever their lengths."""
    made = train_sequences([make_trajectory([(row, float(r)) for row, r in group]) for group in groups], eos_token_id=1)
    wanted = [(number, row, reward) for number, group in enumerate(groups) for row, reward in group]
    assert len(made) == len(wanted)
    for found, (number, row, reward) in zip(made, wanted, strict=True):
        assert (found.group, found.reward, found.truncated) == (number, reward, row.truncated)
        assert (found.tokens, found.logprobs, found.temperature) == (row.tokens, row.logprobs, row.temperature)
        assert found.trainable() == row.trained
        assert found.prompt_mask == [not sampled for sampled in row.sampled]
        assert found.versions == row.versions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("versions"), "lacks the keys versions"),
        (
            lambda t: t.update(rewards=torch.zeros(3)),
            r"a trajectory's entry `rewards` has the shape \[3\]; make it \[1\]",
        ),
        (lambda t: t.update(logprobs=t["logprobs"][:, 1:]), r"a trajectory's entry `logprobs` has the shape \[1, 2\]"),
        (
            lambda t: t.update(rewards=torch.tensor([float("nan")])),
            "a trajectory's entry `rewards` contains a number that is not finite",
        ),
        (lambda t: t.update(loss_mask=torch.ones(1, 3)), "marks tokens that were not sampled"),
        (lambda t: t.update(input_ids=[[1, 2, 3]]), "a trajectory's entry `input_ids` is a list; make it a tensor"),
        (lambda t: t.update(rewards=1.0), "a trajectory's entry `rewards` is a float; make it a tensor"),
        (lambda t: t.update(input_ids=torch.ones(3)), r"a trajectory's entry `input_ids` has the shape \[3\]"),
    ],
)
def test_the_error_for_an_invalid_trajectory_names_the_key(change, message):
    row = TrajectoryRow(
        [1, 2, 3], [False, True, True], [False, True, True], [0] * 3, [0.0, -1, -1], [-1, 0, 0], 1.0, False, list
    )
    trajectory = make_trajectory([(row, 1.0)])
    check_trajectory(trajectory)
    change(trajectory)
    with pytest.raises(UsageError, match=message):
        check_trajectory(trajectory)


def test_a_trajectory_without_rows_is_a_rejected_episode():
    row = TrajectoryRow([1, 2], [False, True], [False, True], [0] * 2, [0.0, -1], [-1, 0], 1.0, False, list)
    trajectory = make_trajectory([(row, 1.0)])
    assert as_trajectory(trajectory) is trajectory
    for check in (False, True):
        assert as_trajectory({name: values[:0] for name, values in trajectory.items()}, check) is None


@given(st.lists(st.one_of(st.none(), st.integers(-3, 3)), max_size=8), st.sampled_from([0.0, 0.5, 1.0]))
def test_discounted_returns_are_sums_over_the_remaining_rewards(rewards, gamma):
    wanted = [sum((r or 0) * gamma**k for k, r in enumerate(rewards[i:])) for i in range(len(rewards))]
    assert discounted_returns([r or 0.0 for r in rewards], gamma) == pytest.approx(wanted)


# -- names -------------------------------------------------------------------------------------------------------------


class Plain(RolloutWorkflow):
    def __init__(self, word: str = "") -> None:
        self.word = word

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> Any:
        return None


class Needy(Plain):
    def __init__(self, word: str) -> None:
        super().__init__(word)


class Agent:
    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        return 1.0


HERE = "tests.experiments.test_workflows"


@pytest.mark.parametrize("named", [Plain("x"), Plain, f"{HERE}.Plain", f"{HERE}:Plain", f"{__file__}:Plain"])
def test_a_workflow_may_be_an_object_a_class_or_a_name(named):
    kwargs = {} if isinstance(named, Plain) else {"word": "x"}
    found = resolve_workflow(named, Generation(), workflow_kwargs=kwargs, n_samples=4)
    assert found.workflow.word == "x"
    assert found.group_size == 4


@pytest.mark.parametrize("named", [Agent(), Agent, f"{HERE}.Agent"])
def test_an_agent_is_wrapped(named):
    found = resolve_workflow(named, Generation(), agent=AgentConfig(turn_discount=0.5))
    assert type(found.workflow).__name__ == "AgentWorkflow"
    assert type(found.workflow.agent).__name__ == "Agent"


@pytest.mark.parametrize(
    ("named", "kwargs", "message"),
    [
        ("areno.nowhere.Plain", {}, "workflow: importing areno.nowhere raised ModuleNotFoundError"),
        (f"{HERE}.Missing", {}, "defines no Missing"),
        ("Plain", {}, "write package.module.Name"),
        ("/nowhere/w.py:Plain", {}, "file does not exist: /nowhere/w.py"),
        (object(), {}, "neither `async def arun_episode"),
        (Plain, {"wrod": 1}, "does not accept workflow_kwargs: .*wrod"),
        (Needy, {}, "Needy cannot be created: missing a required argument: 'word'; give the argument"),
        (Plain("x"), {"word": "y"}, r"workflow_kwargs \(word\) have no effect"),
    ],
)
def test_invalid_workflows_and_arguments_are_refused(named, kwargs, message):
    with pytest.raises(UsageError, match=message):
        resolve_workflow(named, Generation(), workflow_kwargs=kwargs)


def test_an_error_inside_a_constructor_is_not_blamed_on_its_arguments():
    class Faulty(Plain):
        def __init__(self) -> None:
            self.total = 1 + None  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        resolve_workflow(Faulty, Generation())
