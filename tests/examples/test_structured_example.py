"""Free text to JSON: the data, the reward's parts, the evaluation with transformers, and the README's training command."""

import itertools
import json
import shlex
from collections import Counter
from pathlib import Path

import pytest
import transformers as tf

from areno.types import RewardParts, RewardRecord
from tests.examples.scripted import module
from tests.support.cli import areno

FOLDER = Path(__file__).parents[2] / "examples" / "structured"
RIGHT = '{"name":"Ann","count":9,"item":"bread rolls","day":"monday"}'


@pytest.fixture(scope="module")
def data():
    return module(FOLDER / "make_data.py")


@pytest.fixture(scope="module")
def reward():
    return module(FOLDER / "reward.py")


def order(row):
    return row["prompt"][-1]["content"]


def test_equal_seeds_give_equal_files_and_longer_ones_extend_shorter_ones(data, tmp_path, capsys):
    for folder, count, seed in (("a", 40, 0), ("b", 40, 0), ("long", 60, 0), ("other", 40, 1)):
        words = ("--output", tmp_path / folder, "--train-rows", count, "--held-out-rows", count, "--seed", seed)
        data.main(list(map(str, words)))
    assert "40 rows in" in capsys.readouterr().out
    for name in ("train.jsonl", "heldout.jsonl"):
        text = {folder: (tmp_path / folder / name).read_text() for folder in ("a", "b", "long", "other")}
        assert text["a"] == text["b"] != text["other"]
        assert text["long"].startswith(text["a"])
        assert len(text["long"].splitlines()) == 60


def test_held_out_orders_share_neither_forms_nor_names_nor_items_with_training(data):
    train, held_out = list(data.rows("train", 4000)), list(data.rows("heldout", 200))
    assert {row["form"] for row in train} == set(data.TRAIN.forms)
    assert Counter(row["form"] for row in held_out) == dict.fromkeys(data.HELD_OUT.forms, 20)
    assert not {row["form"] for row in train} & {row["form"] for row in held_out}
    assert not {order(row) for row in train} & {order(row) for row in held_out}
    for key in ("name", "item"):
        seen, unseen, shown = (
            {json.loads(text)[key] for text in texts}
            for texts in (
                [row["response"] for row in train],
                [row["response"] for row in held_out],
                [json.dumps(answer) for _, answer in data.EXAMPLES],
            )
        )
        assert not seen & unseen
        assert not shown & (seen | unseen)


def test_every_value_can_be_read_from_its_order(data):
    numbers = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
    numbers |= {"eleven": 11, "twelve": 12}
    for row in [*data.rows("train", 1000), *data.rows("heldout", 200)]:
        answer = json.loads(row["response"])
        assert row["solutions"] == [row["response"]]
        assert list(answer) == ["name", "count", "item", "day"]
        assert answer["name"] in order(row)
        assert answer["item"] in order(row)
        assert [day.lower() for day in data.DAYS if day in order(row)] == [answer["day"]]
        words = order(row).replace(":", " ").split()
        assert [numbers.get(word, word) for word in words if word in numbers or word.isdigit()] in (
            [answer["count"]],
            [str(answer["count"])],
        )


def test_forms_differ_and_name_all_values_once(data):
    for words in (data.TRAIN, data.HELD_OUT):
        assert len(set(words.forms)) == len(words.forms)
        for form, key in itertools.product(words.forms, ("name", "count", "item", "day")):
            assert form.count(f"{{{key}}}") == 1


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (RIGHT, (1, 1, 1, 1)),
        (json.dumps(json.loads(RIGHT), indent=2) + "\n", (1, 1, 1, 1)),
        (f"Here it is: {RIGHT}", (0.5, 1, 1, 1)),
        ('{"name":"Ann","count":"9","item":"rolls","day":1}', (1, 1, 0.5, 0.25)),
        ('{"name":"Ann","count":9.0,"item":"bread rolls","day":"Monday"}', (1, 1, 0.75, 0.5)),
        ('{"name":"Ann","count":9}', (1, 0.5, 0.5, 0.5)),
        (RIGHT[:-1] + ',"price":3}', (1, 0.8, 1, 1)),
        ('{"name":{"first":"Ann"},"count":null,"item":[],"day":"monday"}', (1, 1, 0.25, 0.25)),
        ("{}", (1, 0, 0, 0)),
        (RIGHT[:-1], (0, 0, 0, 0)),
        ('{"name":"Ann","name":"Ann","count":9,"item":"bread rolls","day":"monday"}', (0, 0, 0, 0)),
        ('["name"]', (0, 0, 0, 0)),
        ("", (0, 0, 0, 0)),
        ('{"a":' + "[" * 100_000, (0, 0, 0, 0)),
        ('{"a":' + "9" * 10_000 + "}", (0, 0, 0, 0)),
    ],
)
def test_the_reward_parts_of_hand_written_answers(reward, completion, expected):
    parts = reward.reward_fn(RewardRecord(completion=completion, answer=[RIGHT]))
    assert tuple(parts[name] for name in ("json", "keys", "types", "values")) == expected
    assert parts["exact"] == (expected == (1, 1, 1, 1))
    assert tuple(parts) == reward.PARTS


def test_a_row_without_a_solution_is_refused(reward):
    with pytest.raises(KeyError, match=r"no `solutions`.*make_data\.py"):
        reward.reward_fn(RewardRecord(completion=RIGHT))


def test_evaluation_answers_equal_those_of_transformers_and_both_columns_are_printed(
    data, tiny_checkpoint, tmp_path, capsys
):
    evaluate = module(FOLDER / "evaluate.py")
    rows = list(data.rows("heldout", 5))
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = tf.AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    alone = []
    for row in rows:
        tokens = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        answer = model.generate(tokens, max_new_tokens=12, do_sample=False)[0, tokens.shape[1] :]
        alone.append(tokenizer.decode(answer, skip_special_tokens=True))
    assert any(alone)
    assert evaluate.answers(str(tiny_checkpoint), rows, max_new_tokens=12, batch_size=2) == alone

    file, output = tmp_path / "heldout.jsonl", tmp_path / "scores.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate.main([str(tiny_checkpoint)] * 2 + ["--data", str(file), "--rows", "3", "--output", str(output)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["3", "held-out", "orders", "before", "after"]
    assert lines[1].split() == ["exact", "0.0%", "0.0%"]
    assert order(rows[0]) in lines
    assert json.loads(output.read_text())["rows"] == 3


def test_scores_count_exact_answers_and_average_the_parts(data):
    evaluate = module(FOLDER / "evaluate.py")
    rows = list(data.rows("heldout", 4))
    texts = [rows[0]["response"], f"So: {rows[1]['response']}", "{}", "no"]
    assert evaluate.score(texts, rows) == {"exact": 0.25, "json": 0.625, "keys": 0.5, "types": 0.5, "values": 0.5}


@pytest.fixture(scope="module")
def command():
    """The words of the README's training command, after ``areno``."""
    (block,) = (FOLDER / "README.md").read_text().split("```bash\n")[1:]
    lines = block.split("```")[0].replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if line.startswith("areno train"))
    return shlex.split(line)[1:]


@pytest.mark.parametrize(
    ("completion", "worth"), [(RIGHT, 1.0), ('{"name":"Ann","count":9}', 0.55), ("{}", 0.1), ("", 0)]
)
def test_only_an_exact_answer_earns_one_with_the_readme_weights(reward, command, completion, worth):
    weighted = RewardParts(command[command.index("--reward-weights") + 1])
    parts = reward.reward_fn(RewardRecord(completion=completion, answer=[RIGHT]))
    assert weighted.weigh(parts) == pytest.approx(worth)


@pytest.mark.long
def test_the_readme_command_takes_a_step(data, command, tiny_checkpoint, tmp_path, capsys):
    data.main(["--output", str(tmp_path), "--train-rows", "64", "--held-out-rows", "1"])
    words = list(command)
    changed = {"--ckpt": tiny_checkpoint, "--dataset-path": tmp_path / "train.jsonl", "--run-dir": tmp_path / "run"}
    changed |= {"--reward-fn-path": FOLDER / "reward.py", "--max-steps": 1, "--max-prompt-tokens": 1024}
    for flag, value in changed.items():
        words[words.index(flag) + 1] = str(value)
    done = areno(*words)
    assert done.returncode == 0, done.stderr
    assert "step 1/1 reward=" in done.stdout + done.stderr
    (step,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    means = {name: step[f"rollout/reward_parts/{name}"] for name in ("exact", "json", "keys", "types", "values")}
    worth = 0.1 * means["json"] + 0.1 * means["keys"] + 0.2 * means["types"] + 0.6 * means["values"]
    assert step["rollout/rewards_mean"] == pytest.approx(worth, abs=1e-6)
