import pytest

from areno.config.parser import parse_train
from areno.errors import UsageError


def test_flags_reach_their_fields_and_are_explicit():
    options = parse_train(["--ckpt", "m", "--lr=1e-5", "--no-shuffle", "--greedy", "--top-k", "-1"])
    assert (options.ckpt, options.lr, options.shuffle, options.greedy, options.top_k) == ("m", 1e-5, False, True, -1)
    assert options.explicit == {"ckpt", "lr", "shuffle", "greedy", "top_k"}


def test_nothing_is_explicit_without_flags():
    assert parse_train([]).explicit == frozenset()


def test_repeatable_options_collect_in_order():
    options = parse_train(["--stop", "a", "--stop", "b c", "--stop-token-ids", "1,2", "--stop-token-ids", "3"])
    assert (options.stop, options.stop_token_ids) == (("a", "b c"), (1, 2, 3))


def test_the_last_of_repeated_scalars_wins():
    assert parse_train(["--epochs", "1", "--epochs", "2"]).epochs == 2


def test_negative_numbers_with_an_exponent_are_values_and_not_flags():
    assert parse_train(["--weight-decay", "-1e-6"]).weight_decay == -1e-6


def test_resume_takes_a_path_and_means_auto_without_one():
    assert parse_train(["--resume"]).resume == "auto"
    assert parse_train(["--resume", "--dry-run"]).resume == "auto"
    assert parse_train(["--resume", "runs/x"]).resume == "runs/x"


def test_algorithm_names_are_case_insensitive():
    assert parse_train(["--algo", "GSPO"]).algo == "gspo"


@pytest.mark.parametrize("flag", ["--epoch", "--mini_bs", "--learning-rate", "-lr", "--temp"])
def test_abbreviated_flags_are_refused(flag):
    with pytest.raises(UsageError, match="is not an option"):
        parse_train([flag, "1"])


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--epoch", "--epochs"), ("--mini_bs", "--mini-bs"), ("-lr", "--lr"), ("--no-shufle", "--no-shuffle")],
)
def test_the_nearest_flag_is_named(flag, meant):
    with pytest.raises(UsageError, match=rf"{flag} is not an option \(did you mean {meant}\?\)"):
        parse_train([flag])


def test_all_wrong_values_are_reported_together():
    with pytest.raises(UsageError) as caught:
        parse_train(["--epochs", "many", "--lr", "low", "--bogus"])
    message = str(caught.value)
    assert message.startswith("3 problems:\n  1. ")
    assert all(part in message for part in ("--epochs 'many'", "--lr 'low'", "--bogus"))


def test_flags_override_the_config_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("batch-size: 4\nlr: 1e-5\nstop: [a, b]\nshuffle: false\nmax_steps: null\n")
    options = parse_train(["--config", str(file), "--lr", "2e-5"])
    assert (options.batch_size, options.lr, options.stop, options.shuffle) == (4, 2e-5, ("a", "b"), False)
    assert options.explicit == {"config", "batch_size", "lr", "stop", "shuffle"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch: 3", r"run\.yaml: epoch is not an option \(did you mean epochs\?\)"),
        ("epochs: soon", r"run\.yaml: epochs 'soon': expected an integer"),
        ("epochs: true", r"run\.yaml: epochs True: expected an integer"),
        ("greedy: 1", r"run\.yaml: greedy 1: expected true or false"),
        ("config: other.yaml", "a config file cannot name another config file"),
        ("algo: gsp", r"--algo 'gsp' is unknown \(did you mean gspo\?\)"),
    ],
)
def test_config_errors_name_file_and_key(tmp_path, text, expected):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=expected):
        parse_train(["--config", str(file)])
