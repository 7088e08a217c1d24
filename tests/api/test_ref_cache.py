"""Reference log-probs on disk: what their key depends on, and that damaged or stale files are never read."""

import json
import logging
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from areno.cache_folder import cache_folder
from areno.errors import UsageError
from areno.training.objectives.base import Examples, sequences
from areno.training.objectives.reference import (
    checkpoint_digest,
    load_logprobs,
    reference_key,
    store_logprobs,
)
from areno.types import TrainSequence


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ref_logprobs"


def make_row(tokens, context, **fields):
    return TrainSequence([True] * context + [False] * (len(tokens) - context), list(tokens), **fields)


ROWS = [make_row([5, 6, 7, 8], 2), make_row([9, 1], 0), make_row([2, 3, 4], 1, loss_mask=[True, False, True])]
VALUES = torch.tensor([-1.5, -2.5, -3.5, -4.5])


def files(cache):
    return sorted(path.name for path in cache.iterdir())


def test_trained_tokens_get_their_values_and_all_others_zero():
    examples = Examples(ROWS, 1, VALUES)
    expected = [[0.0, 0.0, -1.5, -2.5], [0.0, -3.5], [0.0, 0.0, -4.5]]
    assert [row.ref_logprobs for row in sequences(examples)] == expected
    assert [row.ref_logprobs for row in sequences(examples[1:3])] == expected[1:]
    assert examples[-1][0].ref_logprobs == expected[-1]
    assert [row.tokens for row in sequences(examples)] == [row.tokens for row in ROWS]
    assert all(row.ref_logprobs == [] for row in ROWS), "the rows themselves are unchanged"
    with pytest.raises(IndexError):
        examples[3]
    (pair,) = Examples(ROWS[:2], 2, VALUES[:3])
    assert [row.ref_logprobs for row in pair] == expected[:2]


def test_stored_values_are_read_bit_for_bit(cache):
    values = torch.randn(1000) * 10 - 20
    store_logprobs("key", values)
    assert torch.equal(load_logprobs("key", 1000), values)
    assert files(cache) == ["key.safetensors"]
    assert load_logprobs("other", 1000) is None


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def damage_empty(path):
    path.write_bytes(b"")


def damage_one_bit(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(bytes(content))


def damage_no_checksum(path):
    save_file(load_file(path), path)


def damage_other_tensor(path):
    save_file({"something": torch.zeros(4)}, path)


@pytest.mark.parametrize("damage", [damage_cut, damage_empty, damage_one_bit, damage_no_checksum, damage_other_tensor])
def test_a_damaged_file_is_ignored_with_one_warning(damage, cache, caplog):
    store_logprobs("key", VALUES)
    damage(cache / "key.safetensors")
    with caplog.at_level(logging.WARNING):
        assert load_logprobs("key", 4) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "key.safetensors is damaged" in caplog.text
    store_logprobs("key", VALUES)
    assert torch.equal(load_logprobs("key", 4), VALUES), "the next run reads an intact file again"


def test_a_file_of_the_wrong_length_is_not_read(caplog):
    store_logprobs("key", VALUES)
    assert load_logprobs("key", 5) is None
    assert "damaged" in caplog.text


def test_an_unwritable_folder_warns_and_stores_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path / "file"))
    store_logprobs("key", VALUES)
    assert "ARENO_CACHE_DIR" in caplog.text
    assert load_logprobs("key", 4) is None


def test_a_kill_while_writing_leaves_no_file_under_the_final_name(cache):
    """The process dies inside ``save_file``, after some bytes are on disk."""
    code = (
        "import os, torch, areno.training.objectives.reference as cache\n"
        "def die(tensors, path, metadata):\n"
        "    open(path, 'wb').write(b'half')\n"
        "    os._exit(9)\n"
        "cache.save_file = die\n"
        "cache.store_logprobs('key', torch.zeros(4))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 9
    assert all(name.startswith(".partial-") for name in files(cache))
    assert load_logprobs("key", 4) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ARENO_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/x"}, "/a/ref_logprobs"),
        ({"ARENO_CACHE_DIR": "", "XDG_CACHE_HOME": "/x"}, "/x/areno/ref_logprobs"),
        ({"ARENO_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/areno/ref_logprobs"),
        ({"ARENO_CACHE_DIR": "~/own", "HOME": "/h"}, "/h/own/ref_logprobs"),
    ],
)
def test_environment_variables_choose_the_folder(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder("ref_logprobs")) == expected


def test_only_equal_content_has_the_same_key():
    def key(rows=ROWS, digest="d", dtype="float32"):
        return reference_key(rows, digest, dtype)

    keys = [
        key(),
        key(digest="e"),
        key(dtype="bfloat16"),
        key(ROWS[:2]),
        key(ROWS[::-1]),
        key([make_row([5, 6, 7, 1], 2), *ROWS[1:]]),
        key([make_row([5, 6, 7, 8], 3), *ROWS[1:]]),
        key([make_row([5, 6, 7], 2), make_row([8, 9, 1], 0), ROWS[2]]),
        key([*ROWS[:2], make_row([2, 3, 4], 1)]),
    ]
    assert len(set(keys)) == len(keys)
    assert key([replace(row, group=7, reward=1.0) for row in ROWS]) == keys[0]


def test_the_digest_depends_on_the_content_of_weights_and_configuration(tiny_checkpoint, tmp_path):
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    digest = checkpoint_digest(str(tiny_checkpoint))
    assert checkpoint_digest(str(copy)) == digest, "the path does not matter"
    (copy / "tokenizer_config.json").write_text("{}")
    (copy / "trainer_state").mkdir()
    assert checkpoint_digest(str(copy)) == digest, "the token rows already reflect the tokenizer"
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    other = checkpoint_digest(str(copy))
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[random.Random(0).randrange(len(content) // 2, len(content))] ^= 1
    weights.write_bytes(bytes(content))
    assert len({digest, other, checkpoint_digest(str(copy))}) == 3


def test_a_repository_is_identified_by_its_commit(tmp_path):
    """A hand-made hub cache, read in a separate process because the hub's paths are fixed on import."""
    repo = tmp_path / "hub" / "models--owner--name"
    for commit in ("aaaa", "bbbb"):
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    code = (
        "import pathlib, sys\n"
        "from areno.training.objectives.reference import checkpoint_digest\n"
        "for commit in ('aaaa', 'bbbb', 'aaaa'):\n"
        "    pathlib.Path(sys.argv[1]).write_text(commit)\n"
        "    print(checkpoint_digest('owner/name'))\n"
    )
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(repo / "refs" / "main")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, again = done.stdout.split()
    assert first == again != second


def test_a_missing_reference_is_a_clear_error():
    with pytest.raises(UsageError, match=r"the reference model owner/nothing was not found: .*--ref-ckpt"):
        checkpoint_digest("owner/nothing")
