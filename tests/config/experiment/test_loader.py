"""Loading configurations from files and command lines."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areno.config.experiment import (
    DPOConfig,
    GRPOConfig,
    NormConfig,
    OptimizerConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
    conf_as_dict,
    config_from,
    experiment_class,
    load_expr_config,
    parse_cli_args,
    save_config,
    settled,
)
from areno.config.experiment.notices import notice
from areno.config.experiment.saving import public_dict
from areno.config.experiment.setting_declaration import settings_of, walk
from areno.config.experiment.tree import apply_override, parse_override
from areno.errors import UsageError
from tests.config.experiment.samples import RL, SAMPLES, SFT, changed, rl, write

REPO = Path(__file__).parents[3]


def load(tmp_path, *overrides, tree=RL, cls=GRPOConfig):
    return load_expr_config(["--config", write(tmp_path / "run.yaml", tree), *overrides], cls)[0]


def problem(tmp_path, *overrides, tree=RL, cls=GRPOConfig):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, *overrides, tree=tree, cls=cls)
    return str(caught.value)


def test_the_program_name_is_ignored_and_the_file_is_returned(tmp_path):
    file = write(tmp_path / "run.yaml", RL)
    config, path = load_expr_config(["train.py", "--config", file, "seed=42"], GRPOConfig)
    assert (config.seed, path) == (42, file)
    assert load_expr_config([f"--config={file}"], GRPOConfig)[0].seed == 1


@pytest.mark.parametrize("cls", SAMPLES)
def test_a_saved_configuration_loads_to_itself(tmp_path, cls):
    config = config_from(SAMPLES[cls], cls)
    file = save_config(config, tmp_path)
    assert file == tmp_path / "config.yaml"
    again = load_expr_config(["--config", str(file)], cls)[0]
    assert again == config
    assert conf_as_dict(again)["actor"]["optimizer"]["lr"] == 1e-4
    first = file.read_text()
    assert save_config(again, tmp_path / "again.yaml").read_text() == first


def test_secrets_are_not_written(tmp_path):
    config = rl(stats_logger__wandb__wandb_api_key="s3cret", stats_logger__swanlab__api_key="s3cret")
    assert "s3cret" not in save_config(config, tmp_path).read_text()
    assert config.stats_logger.swanlab.api_key == "s3cret"


SECRET = {
    "HF_TOKEN": "s3cret-1",
    "NCCL_DEBUG": "s3cret-2",  # every value in env_vars is a secret
    "n": 1,
}


def test_secrets_in_free_form_settings_are_saved_as_references_to_the_environment(tmp_path, monkeypatch):
    kwargs = {
        **{
            name: f"s3cret-{name}" for name in ("password", "access_token", "db-password", "apiKey", "S3_SECRET", "key")
        },
        "storage": {"secret": "s3cret-inner", "endpoint": "https://example.org"},
        "dsn": "postgres://me:s3cret@db/rows",
    }
    harmless = {
        "prompt_key": "question",
        "pad_token": "<pad>",
        "max_tokens": 7,
        "columns": ["a", "b"],
        "tokenizer": "x",
    }
    config = rl(rollout__scheduling_spec=[{"env_vars": SECRET}], train_dataset__dataset_kwargs={**kwargs, **harmless})
    file = save_config(config, tmp_path)
    text = file.read_text()
    assert "s3cret" not in text
    assert "s3cret" not in str(public_dict(config))
    assert file.stat().st_mode & 0o777 == 0o600
    stored = yaml.safe_load(text)["train_dataset"]["dataset_kwargs"]
    assert {name: stored[name] for name in harmless} == harmless
    assert stored["storage"]["endpoint"] == "https://example.org"
    with pytest.raises(UsageError, match=r"HF_TOKEN|PASSWORD"):
        load_expr_config(["--config", str(file)], GRPOConfig)
    names = {"PASSWORD": "password", "ACCESS_TOKEN": "access_token", "DB_PASSWORD": "db-password", "APIKEY": "apiKey"}
    for variable, name in {**names, "S3_SECRET": "S3_SECRET", "KEY": "key", "DSN": "dsn"}.items():
        monkeypatch.setenv(variable, kwargs[name])
    monkeypatch.setenv("SECRET", "s3cret-inner")
    for variable, value in SECRET.items():
        monkeypatch.setenv(variable, str(value))
    again = load_expr_config(["--config", str(file)], GRPOConfig)[0]
    assert again.train_dataset.dataset_kwargs == config.train_dataset.dataset_kwargs
    assert {name: str(value) for name, value in again.rollout.scheduling_spec[0].env_vars.items()} == {
        name: str(value) for name, value in SECRET.items()
    }


def test_names_and_fileroot_apply_to_every_section():
    config = rl(cluster__fileroot="/data/runs", perf_tracer__enabled=True)
    for path, entry, value in walk(config):
        expected = {"experiment_name": "gsm8k-grpo", "trial_name": "trial0", "fileroot": "/data/runs"}.get(entry.name)
        assert value == (expected or value), path
    assert {config.saver.fileroot, config.recover.fileroot, config.rollout.fileroot} == {"/data/runs"}


def test_an_unset_setting_inherits_its_value():
    config = rl(critic__optimizer__lr=1e-3, ref={}, actor__backend="fsdp:d2", actor__dtype="bfloat16")
    assert config.critic is not None
    assert config.ref is not None
    assert config.critic.backend == config.ref.backend == "fsdp:d2"
    assert (
        config.critic.path == config.ref.path == config.tokenizer_path == config.rollout.tokenizer_path == "some/model"
    )
    assert config.ref.dtype == "bfloat16"
    empty = rl(ref={"backend": "", "path": None}).ref
    assert empty is not None
    assert (empty.backend, empty.path) == ("fsdp:d1", "some/model")
    assert config.rollout.max_concurrent_rollouts == config.rollout.consumer_batch_size == 8
    assert config.actor.max_new_tokens == 64
    own = rl(ref__path="another/model", rollout__max_concurrent_rollouts=3)
    assert own.ref is not None
    assert (own.ref.path, own.rollout.max_concurrent_rollouts) == ("another/model", 3)


def test_a_teacher_does_not_use_the_actors_adapter():
    config = rl(actor__use_lora=True, teacher={"path": "a/teacher", "rollout": {}})
    assert config.teacher is not None
    assert config.teacher.rollout is not None
    assert (config.rollout.use_lora, config.teacher.rollout.use_lora) == (True, False)
    assert config.teacher.rollout.backend == "areno:d1"


def test_kl_is_off_without_a_reference_and_on_with_one():
    assert rl().actor.kl_ctl == 0
    assert rl(ref={}).actor.kl_ctl == 0.1
    assert rl(ref__path="another/model").actor.kl_ctl == 0.1
    assert rl(ref={}, actor__kl_ctl=0.0).actor.kl_ctl == 0
    assert rl(ref={}, actor__kl_loss_coef=0.1).actor.kl_ctl == 0


def test_interpolation_reaches_defaults_sections_lists_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ARENO_TEST_ROOT", "/somewhere")
    tree = changed(
        RL,
        {
            "cluster.fileroot": "${oc.env:ARENO_TEST_ROOT}/runs",
            "eval_gconfig": "${gconfig}",
            "valid_dataset": "${train_dataset}",
            "evaluator.freq_steps": "${actor.ppo_n_minibatches}",
            "stats_logger.wandb.tags": ["${experiment_name}", "x-${seed}"],
            "rollout.agent.turn_discount": "${.engine_max_tokens}",
            "rollout.agent.engine_max_tokens": 1,
        },
    )
    config = load(tmp_path, "seed=7", tree=tree)
    assert config.cluster.fileroot == "/somewhere/runs"
    assert config.eval_gconfig == config.gconfig
    assert config.evaluator.freq_steps == 4  # a default
    assert config.stats_logger.wandb.tags == ["gsm8k-grpo", "x-7"]
    assert config.rollout.agent.turn_discount == 1.0


def test_names_may_be_repeated_by_interpolation(tmp_path):
    named = {"experiment_name": "${experiment_name}", "trial_name": "${trial_name}"}
    placed = named | {"fileroot": "${cluster.fileroot}"}
    tree = {
        **{name: value | named for name, value in RL.items() if name in ("rollout", "actor")},
        **dict.fromkeys(("saver", "recover", "evaluator", "stats_logger", "perf_tracer"), placed),
    }
    config = load(tmp_path, "trial_name=trial7", tree=RL | tree)
    plain = load(tmp_path, "trial_name=trial7", "perf_tracer={}")
    assert config == plain
    assert config.saver.trial_name == "trial7"


def test_an_override_of_any_field_needs_no_plus(tmp_path):
    config = load(
        tmp_path,
        *(
            "actor.mb_spec.max_tokens_per_mb=128",
            "critic.optimizer.lr=2e-3",
            "gconfig.stop=[END]",
            "saver.freq_steps=null",
        ),
        *("rollout.scheduling_spec.0.env_vars={A: 1}", "train_dataset.dataset_kwargs.columns=[q, a]"),
    )
    assert config.actor.mb_spec.max_tokens_per_mb == 128
    assert config.critic.optimizer.lr == 2e-3
    assert config.gconfig.stop == ["END"]
    assert config.rollout.scheduling_spec[0].env_vars == {"A": 1}
    assert config.train_dataset.dataset_kwargs == {"columns": ["q", "a"]}


def test_a_key_of_the_file_can_be_removed(tmp_path):
    tree = changed(RL, {"sglang.mem_fraction_static": 0.5, "gconfig.top_p": 0.5})
    assert load(tmp_path, "~sglang", "~gconfig.top_p", tree=tree).gconfig.top_p == 1.0
    assert "nothing to remove" in problem(tmp_path, "~saver.mode")


def test_the_learning_rate_has_a_short_form(tmp_path):
    assert load(tmp_path, "actor.lr=3e-5").actor.optimizer.lr == 3e-5
    assert load(
        tmp_path, tree=changed(SFT, {"actor": {**SFT["actor"], "lr": 3e-5, "optimizer": {"eps": 1e-6}}}), cls=SFTConfig
    )
    both = changed(SFT, {"actor.lr": 1.0})
    assert "actor.lr and actor.optimizer.lr are the same setting" in problem(tmp_path, tree=both, cls=SFTConfig)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text("ab ", max_size=4), st.lists, max_leaves=5))
def test_an_override_sets_what_was_written(value):
    written = f"a.b={yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}"
    tree: dict = {}
    apply_override(tree, parse_override(written))
    assert tree == {"a": {"b": value}}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.kl_clt=1"], "actor.kl_clt is not a setting of GRPOConfig (did you mean actor.kl_ctl?)"),
        (["actr.path=x"], "did you mean actor.path?"),
        (["n_samples=3"], "did you mean gconfig.n_samples?"),
        (["lr=3"], "did you mean actor.optimizer.lr?"),
        (["zzz=1"], "zzz is not a setting of GRPOConfig; remove the key, or declare"),
        (["seed=x"], "seed 'x': expected an integer"),
        (["seed=null"], "seed must not be null"),
        (["seed=[1]"], "seed [1]: expected one value"),
        (["seed=1.5"], "seed 1.5: expected an integer"),
        (["dynamic_bs=3"], "dynamic_bs 3: expected true or false"),
        (["gconfig.top_p=1.5"], "gconfig.top_p must be at most 1, got 1.5"),
        (["gconfig.temperature=.nan"], "gconfig.temperature nan is not a finite number"),
        (
            ["actor.optimizer.type=adamw"],
            "actor.optimizer.type 'adamw' is unknown (did you mean adam?); choose adam, sgd",
        ),
        (["gconfig=3"], "gconfig 3: expected a mapping of the settings of GenerationHyperparameters"),
        (["actor.scheduling_spec=3"], "actor.scheduling_spec 3: expected a list of mappings"),
        (["train_dataset.dataset_kwargs=3"], "train_dataset.dataset_kwargs 3: expected a mapping"),
        (["gconfig.stop_token_ids=[1,x]"], "gconfig.stop_token_ids 'x': expected an integer"),
        (
            ["actor.path=${actor.pth}"],
            "actor.path: ${actor.pth} does not refer to a setting (did you mean actor.path?)",
        ),
        (["actor.path=${tokenizer_path}"], "interpolation cannot be resolved"),
        (["ref=${rollout}"], "PPOActorConfig has no such settings"),
        (["~actor.path"], "actor.path is required"),
        (["~actor.backend"], "actor.backend is required"),
        (["~experiment_name"], "experiment_name is required"),
        (["~train_dataset.path"], "train_dataset.path is required"),
        (["actor.behave_imp_weight_cap=5"], "actor.behave_imp_weight_cap is now rejection_sampling.upper"),
        (["actor.behave_imp_weight_mode=token_mask"], "action: mask"),
        (["actor.recompute_logprobs=true"], "is spelled recompute_logprob"),
        (["actor.group_size=8"], "actor.group_size is gconfig.n_samples in areno"),
        (
            ["actor.dynamic_sampling=true"],
            "actor.dynamic_sampling is not a setting of areno; use workflow.dynamic_filter_fn",
        ),
        (["recover.mode=fault"], "recover.mode 'fault' is unknown"),
        (["seed"], "argument 'seed' is not an override; write key=value"),
        (["--seed=3"], "--seed is not an option; settings are written as key=value"),
        (["gconfig.stop=[a"], "not valid YAML"),
        (["actor.scheduling_spec.3.cpu=1"], "actor.scheduling_spec has 4 entries; use 1 or 2"),
        (["actor.scheduling_spec=[{cpus: 1}]"], "did you mean actor.scheduling_spec.0.cpu?"),
        (["actor.scheduling_spec.0.cpus=1"], "did you mean actor.scheduling_spec.0.cpu?"),
    ],
)
def test_one_clear_error_for_each_mistake(tmp_path, overrides, words):
    text = problem(tmp_path, *overrides)
    assert words in text
    assert "\n" not in text


def test_a_boolean_of_the_file_is_no_text_in_a_list(tmp_path):
    tree = changed(RL, {"gconfig.stop": ["END", False]})
    assert "gconfig.stop false: expected text, not a boolean; put words" in problem(tmp_path, tree=tree)


def test_all_problems_are_reported_at_once(tmp_path):
    text = problem(tmp_path, "seed=x", "gconfig.top_p=2", "actor.eps_clip=-1")
    assert text.startswith("3 problems:")


def test_a_wrong_value_is_reported_once_and_not_where_it_is_inherited(tmp_path):
    assert problem(tmp_path, "gconfig.n_samples=x", "actor.adv_norm={}").count("'x'") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not valid YAML"),
        ("a: 1\na: 2\n", "not valid YAML"),
        ("just text", "is not a mapping of settings"),
        ("- 1\n", "is not a mapping of settings"),
        ("1: 2\n", "is not the name of a setting"),
        ("", "experiment_name is required"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, text, words):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_expr_config(["--config", str(file)], GRPOConfig)
    assert words in str(caught.value)


def test_a_config_file_is_required_and_must_exist(tmp_path):
    for argv, words in (
        (["seed=1"], "--config is required"),
        (["--config"], "--config needs a value"),
        (["--config", str(tmp_path / "none.yaml")], "does not exist"),
        (["--confg", "x"], "did you mean --config?"),
    ):
        with pytest.raises(UsageError, match=words.replace("?", r"\?")):
            load_expr_config(argv, GRPOConfig)


@pytest.mark.parametrize(
    ("path", "raw", "value"),
    [
        ("recover.mode", True, "on"),
        ("recover.mode", False, "off"),
        ("stats_logger.wandb.mode", True, "online"),
        ("stats_logger.wandb.mode", False, "disabled"),
        ("actor.adv_norm.mean_level", "None", None),
        ("actor.dtype", "bf16", "bfloat16"),
        ("actor.dtype", "fp32", "float32"),
        ("actor.optimizer.lr", "1e-4", 1e-4),
        ("trial_name", 7, "7"),
    ],
)
def test_yaml_values_and_aliases_are_normalized(path, raw, value):
    config = rl(**{path.replace(".", "__"): raw})
    assert {name: setting for name, _, setting in walk(config)}[path] == value


def test_the_data_type_selects_the_experiment_class(tmp_path):
    for kind, cls in {"rl": GRPOConfig, "sft": SFTConfig, "rw": RWConfig, "dpo": DPOConfig}.items():
        file = write(tmp_path / "run.yaml", changed(SFT, {"train_dataset.type": kind}))
        assert experiment_class(["--config", file]) is cls
        assert experiment_class(["--config", file, "train_dataset.type=sft"]) is SFTConfig
    with pytest.raises(UsageError, match="choose rl, sft, rw, dpo"):
        experiment_class(["--config", file, "train_dataset.type=none"])
    with pytest.raises(UsageError, match=r"train_dataset.type \['rl'\] is unknown"):
        experiment_class(["--config", file, "train_dataset.type=[rl]"])


def test_the_data_type_may_be_an_interpolation(tmp_path, monkeypatch):
    monkeypatch.setenv("ARENO_TEST_KIND", "dpo")
    tree = changed(SFT, {"valid_dataset": {"path": "rows.jsonl", "type": "sft"}})
    file = write(tmp_path / "run.yaml", changed(tree, {"train_dataset.type": "${valid_dataset.type}"}))
    assert experiment_class(["--config", file]) is SFTConfig
    assert experiment_class(["--config", file, "train_dataset.type=${oc.env:ARENO_TEST_KIND}"]) is DPOConfig
    assert experiment_class(["--config", file, "train_dataset=${valid_dataset}"]) is SFTConfig
    with pytest.raises(UsageError, match=r"train_dataset.type \$\{none.type\} cannot be resolved: .*none.type"):
        experiment_class(["--config", file, "train_dataset.type=${none.type}"])


@dataclass
class _Turns:
    depth: int = 2


@dataclass
class OwnConfig(GRPOConfig):
    max_turns: int = field(default=8, metadata={"help": "Turns of a conversation."})
    words: list[str] = field(default_factory=lambda: ["a"])
    turns: _Turns = field(default_factory=_Turns)

    def __post_init__(self):
        if self.max_turns > 100:
            raise ValueError("max_turns is too large")


def test_a_user_class_may_add_fields(tmp_path):
    config = load(tmp_path, "max_turns=3", "turns.depth=4", "words=[b]", cls=OwnConfig)
    assert (config.max_turns, config.turns.depth, config.words) == (3, 4, ["b"])
    assert "max_turns is too large" in problem(tmp_path, "max_turns=300", cls=OwnConfig)
    assert "did you mean max_turns?" in problem(tmp_path, "max_turn=300", cls=OwnConfig)


@dataclass
class ProgramConfig(PPOConfig):
    """As published programs declare theirs: own fields under the names of areno's sections."""

    workflow: str = field(default="my.Workflow", metadata={"help": "Class of the workflow."})  # type: ignore[assignment]
    eval_workflow: str | None = None
    reward: str = "my.reward"  # type: ignore[assignment]
    turns: _Turns | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    names: list = field(default_factory=list)
    scale: int | float = 1
    anything: Any = None


def test_a_user_class_may_use_section_names_for_its_own_fields(tmp_path):
    words = ["workflow=other.Workflow", "turns.depth=3", "tools=[{name: a}]", "scale=0.5", "anything={x: [1]}"]
    config = load(tmp_path, *words, cls=ProgramConfig)
    assert (config.workflow, config.workflow_section.path) == ("other.Workflow", "other.Workflow")
    assert (config.reward, config.reward_section.fn) == ("my.reward", "my.reward")
    assert (config.turns.depth, config.tools, config.scale, config.anything) == (3, [{"name": "a"}], 0.5, {"x": [1]})
    assert settled(config) == config
    assert load(tmp_path, "rollout.agent.agent_cls_path=agent.py:Agent", cls=ProgramConfig).workflow == "my.Workflow"
    assert notice(config) == ""
    ignored = load(tmp_path, "workflow=multi_turn", "rollout.agent.turn_discount=0.5", cls=ProgramConfig)
    assert "rollout.agent.turn_discount: only read by agents; this run uses the workflow multi_turn" in notice(ignored)
    assert "did you mean workflow?" in problem(tmp_path, "workflw=x", cls=ProgramConfig)


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        load_expr_config(["train.py", "--help"], OwnConfig)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for path, entry in settings_of(OwnConfig).items():
        assert f"  {path}: {entry.type_text}" in text
    for path in (
        "actor.optimizer.lr: float = 0.001",
        "gconfig.n_samples: int = 1",
        "actor.kl_ctl: float = 0.1 with a ref",
    ):
        assert path in text
    assert "Turns of a conversation." in text


def test_arguments_are_parsed():
    args = parse_cli_args(["train.py", "seed=1", "--config", "f.yaml", "~saver"])
    assert (args.config_file, args.overrides, args.help) == ("f.yaml", ("seed=1", "~saver"), False)
    assert parse_cli_args(["runs/lr=1/train.py", "seed=1"]).overrides == ("seed=1",)
    for words in (["reward.fn=a.py", "seed=1"], ["+workflow.kwargs.file=a.py"], ["++reward.fn=./a.py"]):
        assert parse_cli_args(words).overrides == tuple(words)
    assert parse_cli_args(["--config=a.py"]).config_file == "a.py"


def test_loading_imports_neither_torch_nor_transformers(tmp_path):
    file = write(tmp_path / "run.yaml", RL)
    code = (
        "import sys\n"
        "from areno.config.experiment import GRPOConfig, load_expr_config\n"
        "from areno.config.experiment.legacy import load_legacy_config\n"
        f"load_expr_config(['train.py', '--config', {file!r}, 'actor.lr=1e-4', 'seed=42'], GRPOConfig)\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_configurations_can_be_made_in_python():
    config = GRPOConfig(experiment_name="e", trial_name="t")
    assert dataclasses.replace(config.gconfig, n_samples=3).n_samples == 3
    assert config.gconfig.new(top_p=0.5).top_p == 0.5
    assert config.actor.mb_spec.new(n_mbs=2).n_mbs == 2


def test_a_configuration_made_in_python_is_settled_like_one_from_a_file():
    made = GRPOConfig(experiment_name="e", trial_name="t")
    made.train_dataset.path, made.train_dataset.type, made.train_dataset.batch_size = "rows.jsonl", "rl", 8
    made.actor.path, made.actor.backend, made.rollout.backend = "some/model", "fsdp:d1", "areno:d1"
    made.actor.optimizer, made.gconfig.n_samples = OptimizerConfig(lr=1e-4), 4
    made.actor.reward_norm = NormConfig(mean_level="group")
    config = settled(made)
    assert (config.actor.kl_ctl, config.rollout.consumer_batch_size, config.actor.reward_norm.group_size) == (0.0, 8, 4)
    assert (config.saver.experiment_name, config.tokenizer_path) == ("e", "some/model")
    assert made.rollout.consumer_batch_size == 0  # the caller's object is unchanged
    made.actor.kl_ctl = 0.2
    with pytest.raises(UsageError, match=r"actor\.kl_ctl 0\.2 needs a reference"):
        settled(made)


@pytest.mark.parametrize("cls", SAMPLES)
def test_settling_twice_changes_nothing(cls):
    config = config_from(SAMPLES[cls], cls)
    assert settled(config) == config
