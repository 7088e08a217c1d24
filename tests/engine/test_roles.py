"""Roles against transformers: references, critics and reward models, what they score, how they train, what they share."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.model.loading import LoadOptions, load_value_model
from areno.engine.train.batch import pack_rows
from areno.engine.train.optimizer import OptimizerOptions
from areno.engine.train.outputs import predict
from areno.errors import CheckpointError, EngineError, UsageError
from areno.loss_fns import reduces_over, reward_model_loss_fn, sft_loss_fn, value_loss_fn
from areno.types import ModelRole, TrainSequence
from tests.support.tiny import save_tiny_checkpoint

ROWS = [[5, 9, 30, 41, 7], [12, 3], [8, 8, 15, 60, 22, 31, 40, 2, 19], [77]]


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("other") / "model", seed=5, sharpen=3.0)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, other_checkpoint):
    """A sequence classifier with two outputs and a random head, written by transformers."""
    folder = tmp_path_factory.mktemp("classifier") / "model"
    return save_classifier(folder, other_checkpoint, labels=2)


def save_classifier(folder, base, labels=1):
    torch.manual_seed(3)
    module = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    torch.nn.init.normal_(module.score.weight)
    module.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (base / name).exists():
            (folder / name).write_bytes((base / name).read_bytes())
    return folder


@pytest.fixture
def engine(tiny_checkpoint):
    engine = Engine(str(tiny_checkpoint), EngineConfig(optimizer=OptimizerOptions(lr=1e-2)))
    yield engine
    engine.close()


def role(name, path, trainable=False, **more):
    return {name: ModelRole(name, str(path), trainable, **more)}


@torch.no_grad()
def stock_logprobs(path, row, temperature):
    logits = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([row])).logits[0].double() / temperature
    picked = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
    return [0.0, *picked.tolist()]


@torch.no_grad()
def stock_values(path, row):
    module = AutoModelForSequenceClassification.from_pretrained(path)
    return module.score(module.model(torch.tensor([row])).last_hidden_state)[0, :, -1].tolist()


def value_rows(rows=ROWS[:3], prompt=1):
    made = []
    for index, tokens in enumerate(rows):
        own = torch.Generator().manual_seed(index)
        values, returns = (torch.randn(len(tokens), generator=own).tolist() for _ in range(2))
        mask = [i < prompt for i in range(len(tokens))]
        made.append(TrainSequence(mask, tokens, values=values, returns=returns))
    return made


# -- scoring -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_bs", [1, 3, 8])
def test_reference_logprobs_equal_those_of_transformers_at_each_rows_temperature(engine, other_checkpoint, micro_bs):
    engine.ensure_roles(role("ref", other_checkpoint))
    temperatures = [1.0, 0.5, 2.0, 1.0]
    scores = engine.score_logprobs("ref", ROWS, temperatures, micro_bs)
    for row, temperature, score in zip(ROWS, temperatures, scores, strict=True):
        assert score == pytest.approx(stock_logprobs(other_checkpoint, row, temperature), abs=1e-5)


@pytest.mark.parametrize("micro_bs", [1, 3])
def test_a_critics_values_and_a_reward_models_scores_equal_those_of_transformers(engine, classifier, micro_bs):
    engine.ensure_roles(role("critic", classifier, trainable=True) | role("reward", classifier))
    values = engine.score_values("critic", ROWS, micro_bs)
    for row, got in zip(ROWS, values, strict=True):
        assert got == pytest.approx(stock_values(classifier, row), abs=1e-5)
    scores = engine.score_rewards("reward", ROWS, micro_bs)
    module = AutoModelForSequenceClassification.from_pretrained(classifier)
    with torch.no_grad():
        expected = [float(module(torch.tensor([row])).logits[0, -1]) for row in ROWS]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_critic_from_a_causal_model_starts_at_zero_everywhere(engine, other_checkpoint):
    engine.ensure_roles(role("critic", other_checkpoint, trainable=True))
    assert engine.score_values("critic", ROWS) == [[0.0] * len(row) for row in ROWS]


@pytest.mark.parametrize("name", ["score", "v_head", "classifier", "reward_head", "value_head"])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("shape", ["row", "column", "flat", "biased"])
def test_a_head_is_found_under_every_name_and_in_every_shape(tmp_path, other_checkpoint, name, prefix, shape):
    folder = tmp_path / "critic"
    folder.mkdir()
    for file in other_checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    bias = 0.75 if shape == "biased" else 0.0
    stored = {"row": weight, "column": weight.T.contiguous(), "flat": weight[0], "biased": weight}[shape]
    tensors[f"{prefix}{name}.weight"] = stored.clone()
    if bias:
        tensors[f"{prefix}{name}.bias"] = torch.tensor([bias])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = load_value_model(str(folder), LoadOptions(dtype=torch.float32), needs_head=True)
    base = AutoModelForCausalLM.from_pretrained(other_checkpoint)
    batch = pack_rows([TrainSequence([True] * len(ROWS[0]), ROWS[0])])
    with torch.no_grad():
        hidden = base.model(torch.tensor([ROWS[0]])).last_hidden_state[0]
        got = model.values(model.body(batch.tokens, batch.plan.position_ids, batch.plan))
    assert got.tolist() == pytest.approx((hidden @ weight[0] + bias).tolist(), abs=1e-5)


def test_frozen_roles_of_one_checkpoint_share_memory_and_trained_ones_do_not(engine, other_checkpoint, tiny_checkpoint):
    def storage(name):
        return next(engine.role(name).model.module.parameters()).data_ptr()

    engine.ensure_roles(role("ref", other_checkpoint) | role("old", other_checkpoint) | role("start", tiny_checkpoint))
    assert storage("ref") == storage("old")
    assert storage("start") not in (storage("ref"), storage("actor"))
    assert not any(p.requires_grad for p in engine.role("ref").model.module.parameters())


def test_the_reference_stays_while_the_actor_trains(engine, tiny_checkpoint):
    engine.ensure_roles(role("ref", tiny_checkpoint))
    before = engine.score_logprobs("ref", ROWS)
    assert before == engine.score_logprobs("actor", ROWS)
    engine.train([TrainSequence([True, False, False], [4, 5, 6])], sft_loss_fn, 1)
    assert engine.score_logprobs("ref", ROWS) == before
    assert engine.score_logprobs("actor", ROWS) != before


# -- training ----------------------------------------------------------------------------------------------------------


def test_training_a_critic_equals_adamw_on_the_written_out_clipped_value_loss(engine, classifier):
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "grad_clip_norm": 0.5}
    engine.ensure_roles(role("critic", classifier, trainable=True, optimizer=settings))
    module = AutoModelForSequenceClassification.from_pretrained(classifier)
    adam = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    actor_before = copy.deepcopy(engine.actor.model.module.state_dict())
    for _ in range(3):
        stats = engine.train(value_rows(), value_loss_fn, mini_bs=2, role="critic")
        adam.zero_grad()
        terms = []
        for row in value_rows():
            values = module.score(module.model(torch.tensor([row.tokens])).last_hidden_state)[0, :, -1]
            for i in range(1, len(row.tokens)):
                old, target = row.values[i], row.returns[i]
                clipped = old + (values[i - 1] - old).clamp(-0.5, 0.5)
                terms.append(torch.maximum((values[i - 1] - target) ** 2, (clipped - target) ** 2))
        loss = 0.5 * 0.5 * torch.stack(terms).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        adam.step()
        assert stats["loss"] == pytest.approx(float(loss), rel=1e-5)
    trained = dict(engine.role("critic").model.module.named_parameters())
    for name, expected in module.named_parameters():
        assert (trained[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name
    for name, value in engine.actor.model.module.state_dict().items():
        assert torch.equal(value, actor_before[name])


def test_a_zero_head_learns(engine, other_checkpoint):
    engine.ensure_roles(role("critic", other_checkpoint, trainable=True, optimizer_lr=1e-2))
    losses = [engine.train(value_rows(), value_loss_fn, 3, role="critic")["value_mse"] for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]


def preference_rows(pairs=6):
    """Chosen rows hold more of token 11 than rejected ones."""
    own = torch.Generator().manual_seed(0)
    rows = []
    for index in range(pairs):
        prompt = torch.randint(20, 90, (3,), generator=own).tolist()
        for token in (11, 12):
            answer = [token] * (2 + index % 3)
            rows.append(TrainSequence([True] * 3 + [False] * len(answer), prompt + answer, group=index))
    return rows


def test_a_trained_reward_model_loads_in_transformers_and_scores_the_same_padded_batch(tmp_path, other_checkpoint):
    engine = Engine(str(other_checkpoint), EngineConfig(trains="reward", optimizer=OptimizerOptions(lr=3e-3)))
    rows = preference_rows()
    first = engine.train(rows, reward_model_loss_fn, 4)
    for _ in range(20):
        last = engine.train(rows, reward_model_loss_fn, 4)
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)  # a zero head scores all rows alike
    assert last["loss"] < 0.1
    assert last["rm_accuracy"] == 1.0
    engine.save_model(tmp_path / "rm")
    scores = engine.score_rewards("actor", [row.tokens for row in rows])
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    longest = max(len(row.tokens) for row in rows)
    pad = module.config.pad_token_id
    padded = torch.tensor([row.tokens + [pad] * (longest - len(row.tokens)) for row in rows])
    with torch.no_grad():
        expected = module(padded, attention_mask=(padded != pad).long()).logits[:, 0]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(EngineError, match="cannot generate"):
        engine.submit([])
    # and it can serve as the reward role of another run
    policy = Engine(str(other_checkpoint), EngineConfig())
    policy.ensure_roles(role("reward", tmp_path / "rm"))
    assert policy.score_rewards("reward", [row.tokens for row in rows]) == pytest.approx(scores, abs=1e-6)
    policy.close()


@pytest.mark.parametrize("family", ["granite", "gpt2", "qwen3_5", "gemma3"])
def test_critics_work_for_families_with_and_without_a_classifier_in_transformers(tmp_path, family):
    base = save_tiny_checkpoint(tmp_path / "base", family)
    engine = Engine(str(base), EngineConfig())
    engine.ensure_roles(role("critic", base, trainable=True, optimizer_lr=1e-2))
    for _ in range(3):
        engine.train(value_rows(), value_loss_fn, 3, role="critic")
    values = engine.score_values("critic", ROWS)
    assert any(any(row) for row in values)
    engine.role("critic").save_model(tmp_path / "critic", engine.tokenizer)
    engine.ensure_roles(role("value_again", tmp_path / "critic"))
    again = engine.score_values("value_again", ROWS)
    for row, other in zip(values, again, strict=True):
        assert row == pytest.approx(other, abs=1e-6)
    engine.close()


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_actor_and_critic_resume_exactly(tmp_path, tiny_checkpoint, classifier, dtype):
    def make(path):
        engine = Engine(str(path), EngineConfig(dtype=dtype, optimizer=OptimizerOptions(lr=1e-3)))
        engine.ensure_roles(role("critic", classifier, trainable=True, optimizer={"lr": 1e-3, "lr_warmup_steps": 4}))
        return engine

    def steps(engine, count):
        for _ in range(count):
            engine.train(value_rows(), value_loss_fn, 2, role="critic")
            engine.train(value_rows(), sft_loss_fn, 2)

    whole, halted = make(tiny_checkpoint), make(tiny_checkpoint)
    steps(whole, 4)
    steps(halted, 2)
    halted.save_model(tmp_path)
    halted.save_state(tmp_path)
    resumed = make(tmp_path)
    resumed.load_state(tmp_path)
    steps(resumed, 2)
    assert resumed.version == 4
    for name in ("actor", "critic"):
        expected = whole.role(name).model.module.state_dict()
        for key, value in resumed.role(name).model.module.state_dict().items():
            assert torch.equal(value, expected[key]), (name, key)
    for engine in (whole, halted, resumed):
        engine.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda head: [], "TypeError"),
        (lambda head: {k: v for k, v in head.items() if k != "sgd"}, "KeyError: 'sgd'"),
    ],
)
def test_a_damaged_optimizer_state_is_named(engine, tmp_path, damage, reason):
    engine.save_state(tmp_path)
    head = tmp_path / "trainer_state" / "optimizer" / "state.json"
    head.write_text(json.dumps(damage(json.loads(head.read_text()))))
    with pytest.raises(CheckpointError, match=rf"optimizer is damaged or incomplete: {reason}"):
        engine.load_state(tmp_path)


def test_a_learning_rate_that_was_set_is_used_and_reported_and_survives_a_resume(tmp_path, tiny_checkpoint):
    rows = [TrainSequence([True, False, False], [4, 5, 6])]
    config = OptimizerOptions(lr=1e-3, min_lr=0.0, lr_decay_steps=10, lr_decay_style="linear")
    engine = Engine(str(tiny_checkpoint), EngineConfig(optimizer=config))
    optimizer = engine.actor.trained_by()
    assert optimizer.learning_rate == pytest.approx(9e-4)
    assert engine.train(rows, sft_loss_fn, 1)["lr"] == pytest.approx(9e-4)
    optimizer.learning_rate = 5e-5
    assert engine.train(rows, sft_loss_fn, 1)["lr"] == 5e-5
    engine.save_model(tmp_path)
    engine.save_state(tmp_path)
    again = Engine(str(tmp_path), EngineConfig(optimizer=config))
    again.load_state(tmp_path)
    assert again.train(rows, sft_loss_fn, 1)["lr"] == 5e-5


# -- entropy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
def test_entropy_and_logit_bounds_are_computed_only_for_losses_that_request_them(engine, chunked, monkeypatch):
    from areno.engine.model import causal_lm

    if chunked:
        monkeypatch.setattr(causal_lm, "CHUNK_ELEMENTS", 3 * engine.actor.model.vocab_size)
    seen = {}

    @reduces_over("token", entropy=True, bounds=True)
    def asking(pack, logprobs):
        seen.update(pack)
        return -logprobs.sum() / pack["packed_response_mask"].sum()

    row = TrainSequence([True, True, False, False, False], ROWS[0], temperature=0.7)
    step_of = engine.actor.training.run
    step_of([row], asking, 1)
    fresh = AutoModelForCausalLM.from_pretrained(engine.path)
    with torch.no_grad():
        logits = fresh(torch.tensor([row.tokens])).logits[0].double()
        logp = (logits / 0.7).log_softmax(-1)
    expected = -(logp.exp() * logp).sum(-1)[:-1]
    assert seen["packed_entropy"].tolist() == pytest.approx([0.0, *expected[1:].tolist()], abs=1e-5)
    for name, bound in (("packed_min_logits", logits.min(-1).values), ("packed_max_logits", logits.max(-1).values)):
        assert seen[name].tolist() == pytest.approx([0.0, *bound[1:-1].tolist()], abs=1e-5)
        assert not seen[name].requires_grad
    assert not seen["packed_entropy"].requires_grad
    seen.clear()
    step_of([row], lambda pack, logprobs: seen.update(pack) or -logprobs.sum(), 1)
    assert not {"packed_entropy", "packed_min_logits", "packed_max_logits"} & set(seen)


def test_tokens_that_a_model_rules_out_add_nothing_to_the_entropy(engine):
    model = engine.actor.model
    model.module.lm_head.weight.data[7:] = 0.0
    bias = torch.full((model.vocab_size,), float("-inf"))
    bias[:4] = 0.0
    model.own_logits = lambda hidden: hidden @ model.module.lm_head.weight.T * 0.0 + bias  # type: ignore[method-assign]
    batch = pack_rows([TrainSequence([True, False], [1, 2])])
    predict(model, "policy", batch, True, False)
    assert batch.data["packed_entropy"].tolist() == pytest.approx([torch.tensor(4.0).log().item()])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_each_misuse_is_named(engine, other_checkpoint, classifier, tmp_path):
    with pytest.raises(EngineError, match=r"no role 'ref' \(loaded roles: actor\); load the role with"):
        engine.score_logprobs("ref", ROWS)
    engine.ensure_roles(role("ref", other_checkpoint))
    engine.ensure_roles(role("ref", other_checkpoint))  # a second time changes nothing
    with pytest.raises(EngineError, match=r"role 'ref' is already loaded from .*; call drop_role"):
        engine.ensure_roles(role("ref", classifier))
    with pytest.raises(EngineError, match="role 'ref' is frozen"):
        engine.train(value_rows(), sft_loss_fn, 2, role="ref")
    with pytest.raises(EngineError, match="role 'ref' predicts log-probs, not values"):
        engine.score_values("ref", ROWS)
    with pytest.raises(EngineError, match="role 'ref' predicts log-probs, not rewards"):
        engine.score_rewards("ref", ROWS)
    with pytest.raises(EngineError, match="actor cannot be dropped"):
        engine.drop_role("actor")
    engine.drop_role("ref")
    with pytest.raises(EngineError, match="no role 'ref'"):
        engine.drop_role("ref")
    with pytest.raises(UsageError, match=r"^role 'reward' \S+ has no scalar head with one of the names score, v_head"):
        engine.ensure_roles(role("reward", other_checkpoint))
    with pytest.raises(UsageError, match=r"ModelRole\('critic'\).optimizer has no key learning_rate"):
        engine.ensure_roles(role("critic", classifier, trainable=True, optimizer={"learning_rate": 1.0}))
    with pytest.raises(UsageError, match=r"role 'critic' .*: this hub id could not be loaded"):
        engine.ensure_roles(role("critic", tmp_path / "missing", trainable=True))
    with pytest.raises(UsageError, match=r"weights do not match the configuration: lm_head.weight is missing"):
        engine.ensure_roles(role("teacher", classifier))
    with pytest.raises(ValueError, match="row 1 is empty"):
        engine.score_logprobs("actor", [[1], []])
    with pytest.raises(
        ValueError,
        match="temperatures must be one number, or a list with one number for each of 4 rows; got a list of length 2",
    ):
        engine.score_logprobs("actor", ROWS, [1.0, 1.0])


def test_a_role_of_another_tokenizer_is_refused_by_name(engine, tmp_path):
    other = save_tiny_checkpoint(
        tmp_path / "other", texts=["entirely different words make different pieces"] * 9, vocab=300
    )
    with pytest.raises(
        UsageError,
        match=r"role 'ref': all roles must have the same token ids, but token .* has the id .* in the tokenizer of .* and",
    ):
        engine.ensure_roles(role("ref", other))


def test_repeated_non_finite_gradients_end_the_training_of_a_role_even_across_calls(engine):
    rows = [TrainSequence([True, False], [4, 5])]
    for _ in range(4):
        assert engine.train(rows, lambda pack, logprobs: logprobs.sum() * float("nan"), 1)["update_skipped"] == 1.0
    with pytest.raises(EngineError, match="not finite in 5 updates in a row"):
        engine.train(rows, lambda pack, logprobs: logprobs.sum() * float("nan"), 1)


def test_role_kinds_follow_from_the_name_unless_set():
    kinds = {"ref": "policy", "critic": "value", "value_net": "value", "reward": "reward", "teacher": "policy"}
    assert {name: ModelRole(name, "p", False).predicts for name in kinds} == kinds
    assert ModelRole("judge", "p", False, kind="reward").predicts == "reward"
    with pytest.raises(ValueError, match=r"kind 'polcy' is unknown"):
        ModelRole("x", "p", False, kind="polcy")
    with pytest.raises(ValueError, match="role 'ref' is frozen, so optimizer settings have no effect"):
        ModelRole("ref", "p", False, optimizer_lr=1e-5)


def test_a_head_of_another_width_is_refused(tmp_path, classifier):
    folder = tmp_path / "wide"
    folder.mkdir()
    for file in classifier.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["v_head.weight"] = torch.zeros(1, 48)
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32
    with pytest.raises(UsageError, match="takes 48 features, but the hidden states of the model have 32"):
        load_value_model(str(folder), LoadOptions(dtype=torch.float32))


def test_only_models_of_the_random_checkpoint_are_random(tiny_checkpoint, other_checkpoint, classifier, tmp_path):
    optimizer = OptimizerOptions(lr=1e-2)
    config = EngineConfig(optimizer=optimizer, random_path=str(tiny_checkpoint), random_seed=3)
    rows = [[5, 6, 7, 8, 9]]
    with contextlib.closing(Engine(str(tiny_checkpoint), config)) as engine:
        engine.ensure_roles(role("ref", tiny_checkpoint) | role("teacher", other_checkpoint))
        engine.ensure_roles(role("reward", classifier, kind="reward"))
        initial = engine.score_logprobs("actor", rows)[0]
        assert engine.score_logprobs("ref", rows)[0] == initial
        assert engine.score_logprobs("teacher", rows)[0] == pytest.approx(
            stock_logprobs(other_checkpoint, rows[0], 1.0), abs=1e-4
        )
        assert initial != pytest.approx(stock_logprobs(tiny_checkpoint, rows[0], 1.0), abs=1e-2)
        engine.save_model(tmp_path / "saved")
    with contextlib.closing(Engine(str(tmp_path / "saved"), config)) as resumed:  # as after recovery
        resumed.ensure_roles(role("ref", tiny_checkpoint))
        assert resumed.score_logprobs("ref", rows)[0] == initial


def test_a_role_opened_from_a_checkpoint_is_restored_without_its_base(tiny_checkpoint, classifier, tmp_path):
    base, saved = shutil.copytree(classifier, tmp_path / "base"), tmp_path / "saved"
    config = EngineConfig(optimizer=OptimizerOptions(lr=1e-2))
    spec = role("critic", base, trainable=True, optimizer_lr=1e-2)

    def learn(engine):
        engine.train(value_rows(), value_loss_fn, mini_bs=2, role="critic")
        return engine.score_values("critic", ROWS)

    with contextlib.closing(Engine(str(tiny_checkpoint), config)) as engine:
        engine.ensure_roles(spec, tmp_path / "missing")  # a role that the checkpoint does not contain
        learn(engine)
        saved.mkdir()
        engine.save_model(saved)
        engine.save_state(saved)
        values, later = engine.score_values("critic", ROWS), learn(engine)
    (base / "model.safetensors").unlink()
    with contextlib.closing(Engine(str(saved), config)) as resumed:
        resumed.ensure_roles(spec, saved)
        resumed.ensure_roles(spec)  # the same role
        for _ in range(2):
            resumed.load_state(saved)
            assert resumed.score_values("critic", ROWS) == values
            assert learn(resumed) == later
