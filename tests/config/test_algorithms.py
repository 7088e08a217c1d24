import functools
import importlib
import re
import subprocess
import sys

import pytest

from areno.config import AlgorithmSpec, TrainOptions, get_algorithm, list_algorithms, register_algorithm
from areno.config import algorithms as registry
from areno.config.parser import parse_train, train_help
from areno.config.validate import validate
from areno.config.yaml_io import dump_config, load_config
from areno.errors import UsageError
from areno.loss_fns import RejectionSampling
from tests.config.workspace import BASE, GSPO

ALGORITHM = """
from __future__ import annotations
from dataclasses import dataclass
from areno.config import AlgorithmSpec, option

@dataclass(kw_only=True)
class MyOptions:
    tau: float = option(0.5, above=0, maximum=1, help="Softness.")
    deep: bool = option(False, help="Go deep.")
    layers: tuple[int, ...] = option((), help="Which layers.")

class MyTrainer:
    pass

def my_loss(data_pack, logprobs):
    return logprobs.sum()

mine = AlgorithmSpec("mine", MyTrainer, my_loss, True, options=MyOptions, uses=("grpo_clip_eps",))
other = AlgorithmSpec("other", MyTrainer, None, True)
number = 3
"""


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


@pytest.fixture
def algorithm_file(workspace):
    (workspace / "algo.py").write_text(ALGORITHM)
    return workspace / "algo.py"


def test_algorithms_are_listed_sorted():
    names = "cispo dapo dpo gmpo grpo gspo icepop m2po ppo rm sapo sft simpo"
    assert list_algorithms() == names.split()
    probe = "import sys; from areno.config import list_algorithms; list_algorithms(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


def test_a_trainer_class_has_the_options_of_its_name(workspace):
    (workspace / "algo.py").write_text(
        "from areno.api.trainers.policy_only import PolicyOnlyTrainer\n"
        "from areno.api.trainers.supervised import PairTrainer\n"
        "from areno.config import AlgorithmSpec\n"
        "from areno.loss_fns import dpo_loss_fn, grpo_loss_fn\n"
        "class Mine(PolicyOnlyTrainer): pass\n"
        "policy = AlgorithmSpec('policy', PolicyOnlyTrainer, grpo_loss_fn)\n"
        "derived = AlgorithmSpec('derived', Mine, grpo_loss_fn)\n"
        "pairs = AlgorithmSpec('pairs', PairTrainer, dpo_loss_fn, False)\n"
    )
    words = ["--advantage", "rloo", "--update-epochs", "2", "--kl-reward-coef", "0.1", "--ref-ckpt", "model"]
    for name in ("policy", "derived"):
        validate(parse_train([*GSPO, "--algo", f"algo.py:{name}", *words]))
    validate(parse_train([*BASE, "--algo", "algo.py:pairs", "--no-tree-training"]))
    with pytest.raises(UsageError, match="--mini-bs 3 would split a pair"):
        validate(parse_train([*BASE, "--algo", "algo.py:pairs", "--mini-bs", "3"]))


def test_names_are_case_insensitive():
    assert get_algorithm("SFT") is get_algorithm("sft")


def test_a_taken_name_needs_replace(clean_registry):
    spec = AlgorithmSpec("GSPO", object, None, True)
    with pytest.raises(ValueError, match="'gspo' is already registered"):
        register_algorithm(spec)
    assert register_algorithm(spec, replace=True) is spec
    assert get_algorithm("gspo") is spec


def test_experimental_algorithms_can_be_left_out(clean_registry):
    register_algorithm(AlgorithmSpec("trial", object, None, True, experimental=True))
    assert "trial" in list_algorithms()
    assert "trial" not in list_algorithms(include_experimental=False)


def test_the_clip_eps_option_is_bound_into_the_loss():
    loss = get_algorithm("grpo").make_loss_fn(TrainOptions(algo="grpo", grpo_clip_eps=0.3))
    assert isinstance(loss, functools.partial)
    assert loss.keywords["clip_eps"] == 0.3
    assert loss.func is get_algorithm("grpo").resolve_default_loss()


@pytest.mark.parametrize(
    ("algo", "options", "bound"),
    [
        ("gspo", {"gspo_clip_eps": 0.5, "clip_eps_high": 0.6, "kl_coef": 0.1, "kl_loss_type": "k1"},
         {"clip_eps": 0.5, "clip_eps_high": 0.6, "kl_coef": 0.1, "kl_type": "k1"}),
        ("grpo", {"grpo_dual_clip": 2.0, "grpo_loss_mean": "dr_grpo", "max_new_tokens": 77},
         {"dual_clip": 2.0, "loss_mean": "dr_grpo", "max_tokens": 77}),
        ("ppo", {"clip_eps": 0.1, "clip_ratio_c": 4.0, "use_kl_loss": False, "kl_loss_coef": 0.5, "kl_loss_type": "abs"},
         {"clip_eps": 0.1, "clip_ratio_c": 4.0, "use_kl_loss": False, "kl_loss_coef": 0.5, "kl_loss_type": "abs"}),
        ("dpo", {"dpo_beta": 0.3, "dpo_loss_type": "hinge", "dpo_label_smoothing": 0.1, "dpo_length_normalized": True},
         {"beta": 0.3, "loss_type": "hinge", "label_smoothing": 0.1, "length_normalized": True}),
    ],
)  # fmt: skip
def test_the_options_of_an_algorithm_reach_its_loss(algo, options, bound):
    keywords = get_algorithm(algo).make_loss_fn(TrainOptions(algo=algo, **options)).keywords
    assert {name: keywords[name] for name in bound} == bound


@pytest.mark.parametrize(
    ("argv", "knobs"),
    [
        (["--algo", "dapo"], {"eps_clip": 0.2, "eps_clip_higher": 0.28}),
        (["--algo", "dapo", "--eps-clip-higher", "0.3", "--c-clip", "3"], {"eps_clip_higher": 0.3, "c_clip": 3.0}),
        (["--algo", "cispo", "--eps-clip", "0.1"], {"use_cispo_loss": True, "eps_clip": 0.1, "eps_clip_higher": None}),
        (["--algo", "SAPO", "--sapo-tau-neg", "2"], {"use_sapo_loss": True, "sapo_tau_neg": 2.0}),
        (["--algo", "m2po"], {"use_decoupled_loss": True, "m2_threshold": 0.04, "eps_clip": 0.0}),
        (["--algo", "icepop"], {"rejection_sampling": RejectionSampling(lower=0.5, upper=5.0)}),
        (
            ["--algo", "icepop", "--rejection-sampling-upper", "4", "--rejection-sampling-level", "sequence"],
            {"rejection_sampling": RejectionSampling(lower=0.5, upper=4.0, level="sequence")},
        ),
        (["--algo", "gmpo"], {"gmpo_clip_eps": 0.4}),
        (["--algo", "gmpo", "--gmpo-clip-eps", "0.3"], {"gmpo_clip_eps": 0.3}),
    ],
)
def test_flags_reach_the_knobs_of_an_algorithm_in_a_file(workspace, argv, knobs):
    options = parse_train([*GSPO, *argv, "--update-epochs", "2", "--advantage", "rloo"])
    validate(options)
    made = get_algorithm(options.algo).make_loss_fn(options).keywords["knobs"]
    assert {name: getattr(made, name) for name in knobs} == knobs


def test_flags_reach_the_knobs_of_a_preference_loss(workspace):
    pairs = ["--ckpt", "model", "--dataset-path", "data.jsonl", "--algo", "simpo"]
    options = parse_train([*pairs, "--simpo-beta", "2.5", "--score-micro-bs", "4"])
    validate(options)
    knobs = get_algorithm("simpo").make_loss_fn(options).keywords["knobs"]
    assert (knobs.simpo_beta, knobs.simpo_gamma) == (2.5, 1.0)
    for argv, expected in {
        ("--mini-bs", "3"): "would split a pair",
        ("--dpo-beta", "1"): "applies to --algo dpo",
    }.items():
        with pytest.raises(UsageError, match=expected):
            validate(parse_train([*pairs, *argv]))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--algo", "cispo", "--c-clip", "3"], "c_clip 3.0 has no effect with use_cispo_loss"),
        (["--algo", "dapo", "--sapo-tau-pos", "2"], "sapo_tau_pos 2.0 has no effect without SAPO"),
        (["--algo", "dapo", "--m2-threshold", "0.1"], "m2_threshold needs proximal log-probs"),
        (
            ["--algo", "dapo", "--use-decoupled-loss", "--prox-logp-method", "linear"],
            "--prox-logp-method linear needs the weight version of each token",
        ),
        (
            ["--algo", "icepop", "--prox-logp-method", "metrics"],
            "--prox-logp-method metrics needs the weight version of each token",
        ),
        (
            ["--algo", "dapo", "--rejection-sampling-upper", "5"],
            "rejection_sampling has no effect without use_decoupled_loss",
        ),
        (
            ["--algo", "icepop", "--rejection-sampling-upper", "1"],
            "rejection_sampling.upper 1.0 would reject every increase in probability",
        ),
        (["--algo", "dapo", "--eps-clip=-1"], "--eps-clip must be non-negative"),
        (["--algo", "gmpo", "--kl-coef", "0.1"], "--kl-coef 0.1 applies to --algo gspo and grpo, not to gmpo"),
    ],
)
def test_knobs_without_effect_are_refused(workspace, argv, expected):
    with pytest.raises(UsageError, match=re.escape(expected)):
        validate(parse_train([*GSPO, *argv]))


def test_sft_uses_its_default_loss():
    spec = get_algorithm("sft")
    assert spec.make_loss_fn(TrainOptions(algo="sft")).__name__ == spec.default_loss_name == "sft_loss_fn"


def test_an_algorithm_in_a_file_brings_its_own_flags(algorithm_file):
    argv = [*GSPO, "--algo", "algo.py:mine", "--tau", "0.25", "--deep", "--layers", "1,2", "--grpo-clip-eps", "0.1"]
    options = parse_train(argv)
    assert options.extra == {"tau": 0.25, "deep": True, "layers": (1, 2)}
    assert {"tau", "deep", "layers"} <= options.explicit
    validate(options)
    assert get_algorithm(options.algo).resolve_trainer_cls().__name__ == "MyTrainer"
    assert get_algorithm(options.algo).make_loss_fn(options).__name__ == "my_loss"


def test_own_flags_are_in_help_and_have_defaults(algorithm_file):
    text = train_help(["--algo", "algo.py:mine", "--help"])
    assert "Options of mine:" in text
    assert "--tau FLOAT" in text
    assert "Default: 0.5." in text
    assert parse_train(["--algo", "algo.py:mine"]).extra == {"tau": 0.5, "deep": False, "layers": ()}


def test_bounds_of_own_flags_are_checked(algorithm_file):
    with pytest.raises(UsageError, match="--tau must be at most 1, got 2"):
        validate(parse_train([*GSPO, "--algo", "algo.py:mine", "--tau", "2"]))


def test_own_options_are_stored_and_read_from_yaml(algorithm_file, workspace):
    text = dump_config(parse_train([*GSPO, "--algo", "algo.py:mine", "--tau", "0.75"]))
    (workspace / "c.yaml").write_text(text)
    assert load_config("c.yaml")["tau"] == 0.75
    assert parse_train(["--config", "c.yaml"]).extra["tau"] == 0.75


def test_own_flags_are_unknown_to_other_algorithms(workspace):
    with pytest.raises(UsageError, match="--tau is not an option"):
        parse_train(["--tau", "1"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("algo.py", "names no algorithm"),
        ("algo.py:nope", r"defines no nope; choose an AlgorithmSpec of this file \(found: mine, other\)"),
        ("algo.py:number", "is a int; pass an areno.config.AlgorithmSpec"),
        ("gone.py:x", "--algo file does not exist: gone.py"),
        ("gsppo", r"did you mean gspo\?"),
        ("zzz", "registered: cispo, dapo, dpo, gmpo, grpo, gspo, icepop, m2po, ppo, rm, sapo, sft, simpo"),
    ],
)
def test_unusable_algorithms_say_why(algorithm_file, name, expected):
    with pytest.raises(UsageError, match=expected):
        get_algorithm(name)


def test_own_options_may_not_take_a_builtin_name(workspace):
    (workspace / "algo.py").write_text(ALGORITHM.replace("tau: float = option(0.5", "lr: float = option(0.5"))
    with pytest.raises(UsageError, match="declares --lr, which is already an option of areno train"):
        parse_train(["--algo", "algo.py:mine"])


def test_installed_packages_publish_algorithms(workspace, monkeypatch):
    package = workspace / "site"
    (package / "plug-1.0.dist-info").mkdir(parents=True)
    (package / "plug-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (package / "plug-1.0.dist-info" / "entry_points.txt").write_text(
        "[areno.algorithms]\nplugged = areno_plug:spec\nbroken = areno_plug:gone\n"
    )
    (package / "areno_plug.py").write_text(
        "from areno.config import AlgorithmSpec\nspec = AlgorithmSpec('plugged', object, None, False)\n"
    )
    monkeypatch.syspath_prepend(str(package))
    importlib.invalidate_caches()
    assert get_algorithm("Plugged").trainer is object
    with pytest.raises(UsageError, match="--algo broken: loading areno_plug:gone raised AttributeError"):
        get_algorithm("broken")
    with pytest.raises(UsageError, match="plugged"):
        get_algorithm("unheard-of")
    sys.modules.pop("areno_plug")
