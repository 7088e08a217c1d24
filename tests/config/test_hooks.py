import sys
from dataclasses import replace

import pytest

from areno.config.hooks import REWARD_HOOK, load_hook, named_object, split_spec
from areno.errors import UsageError


def load(path, text=None, *, name="", positional=1, keywords=()):
    if text is not None:
        path.write_text(text)
    hook = replace(REWARD_HOOK, positional=positional, keywords=keywords)
    return load_hook(f"{path}:{name}" if name else str(path), hook)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "hook.py"


@pytest.mark.parametrize(
    "text",
    [
        "def reward_fn(record):\n    return 1.0",
        "async def reward_fn(record):\n    return 1.0",
        "reward_fn = lambda record: 1.0",
        "from operator import truth as reward_fn",
        "def reward_fn(*args):\n    return 1.0",
        "def reward_fn(record, scale=2):\n    return 1.0",
        "class R:\n    def __call__(self, record):\n        return 1.0\nreward_fn = R()",
        "from functools import partial\nreward_fn = partial(lambda scale, record: 1.0, 2)",
    ],
)
def test_any_callable_with_the_right_arguments_works(file, text):
    assert callable(load(file, text))


def test_a_named_function_is_used(file):
    assert load(file, "def score(record):\n    return 7", name="score")(None) == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", r"hook\.py defines no reward_fn; define reward_fn\(record\)"),
        ("reward_fn = 3", "reward_fn is a int; define a function"),
        (
            "def reward_fn():\n    pass",
            "does not accept the arguments that areno passes: too many positional arguments",
        ),
        ("def reward_fn(a, b):\n    pass", "missing a required argument: 'b'"),
        ("def reward_fn(a, *, b):\n    pass", "missing a required (keyword-only )?argument: 'b'"),
        ("def reward_fn(record)\n    pass", r"hook\.py line 1 is not valid Python: expected ':'"),
        ("x = 1\nprint(1 / 0)\n", r"raised ZeroDivisionError: division by zero \(at hook\.py line 2: print\(1 / 0\)\)"),
        ("import no_such_module_anywhere", "raised ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("import sys\nsys.exit(3)", "importing the file raised SystemExit: 3"),
        ("\0", "not valid Python"),
    ],
)
def test_unusable_files_say_why_and_where(file, text, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        load(file, text)
    assert "--reward-fn-path" in str(caught.value)


def test_missing_files_name_the_expected_callable(file):
    with pytest.raises(
        UsageError, match=r"file does not exist: .*hook\.py; pass a Python file that defines reward_fn\(record\)"
    ):
        load(file)


def test_a_folder_is_not_a_hook(tmp_path):
    with pytest.raises(UsageError, match="is not a file"):
        load(tmp_path)


def test_keyword_arguments_of_the_call_must_be_accepted(file):
    keywords = ("default_loader", "load_dataset")
    assert callable(load(file, "def reward_fn(path, *, default_loader, **_):\n    return 1", keywords=keywords))
    with pytest.raises(UsageError, match="unexpected keyword argument 'load_dataset'"):
        load(file, "def reward_fn(path, *, default_loader):\n    return 1", keywords=keywords)


def test_sibling_modules_can_be_imported_later_inside_the_function(file):
    (file.parent / "sibling_of_hook.py").write_text("VALUE = 5")
    assert load(file, "def reward_fn(record):\n    from sibling_of_hook import VALUE\n    return VALUE")(None) == 5


def test_a_broken_sibling_is_named(file):
    (file.parent / "broken_sibling.py").write_text("\n\nraise ValueError('bad table')")
    with pytest.raises(UsageError, match=r"ValueError: bad table \(at broken_sibling\.py line 3"):
        load(file, "import broken_sibling\ndef reward_fn(record):\n    return 1")


def test_a_file_is_imported_once_and_again_after_a_change(file):
    first = load(file, "calls = []\ndef reward_fn(record):\n    return calls")
    assert load(file)(None) is first(None)
    assert load(file, "def reward_fn(record):\n    return 'new'")(None) == "new"


def test_files_with_the_same_name_do_not_conflict(tmp_path):
    hooks = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        hooks.append(load(tmp_path / folder / "hook.py", f"def reward_fn(record):\n    return {folder!r}"))
    assert [hook(None) for hook in hooks] == ["a", "b"]


def test_a_failed_import_leaves_no_module_behind(file):
    before = {name for name in sys.modules if name.startswith("areno_user_hook")}
    with pytest.raises(UsageError):
        load(file, "raise ValueError")
    assert {name for name in sys.modules if name.startswith("areno_user_hook")} == before


@pytest.mark.parametrize("spec", ["", ":f", "a.py:", "a.py:1x", "a.py:f:g"])
def test_malformed_specs_show_the_right_form(spec):
    with pytest.raises(UsageError, match=r"write file\.py or file\.py:reward_fn"):
        split_spec(spec, option="--reward-fn-path", default_name="reward_fn")


@pytest.mark.parametrize("form", ["hookpkg.pytools.fn", "hookpkg.pytools:fn", "{root}/hookpkg/pytools.py:fn"])
def test_a_named_object_comes_from_a_module_or_a_file(tmp_path, monkeypatch, form):
    (tmp_path / "hookpkg").mkdir()
    (tmp_path / "hookpkg" / "pytools.py").write_text("def fn():\n    return 'found'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert named_object(form.format(root=tmp_path), option="reward.fn")() == "found"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hook.py:1x", r"'hook\.py:1x' is malformed; write file\.py:NAME$"),
        ("hook.py", r"'hook\.py' names no object in hook\.py; write hook\.py:Name$"),
        ("json.", r"'json\.' names no object in json; write json:Name$"),
        (
            "hook.py:absent",
            r"'hook\.py:absent': hook\.py defines no absent; write hook\.py:Name with a name that is defined$",
        ),
    ],
)
def test_a_named_object_needs_a_name(file, monkeypatch, spec, message):
    monkeypatch.chdir(file.parent)
    file.write_text("x = 1")
    with pytest.raises(UsageError, match=rf"reward\.fn {message}"):
        named_object(spec, option="reward.fn")


def test_a_missing_file_is_not_taken_for_a_module(tmp_path):
    with pytest.raises(UsageError, match=r"reward\.fn file does not exist"):
        named_object(f"{tmp_path}/absent.py:fn", option="reward.fn")
