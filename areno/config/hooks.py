"""Loads user-defined functions (hooks) from Python files, and checks their signatures.

The checks run before a model is loaded, so that mistakes are reported early. The folder of a file stays on ``sys.path``,
because a hook may import modules from this folder when the hook is called.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from areno.errors import UsageError
from areno.python_process import python_command, search_path


@dataclass(frozen=True, slots=True)
class Hook:
    """A kind of user-defined callable, such as a reward function.

    The user specifies the callable with the command-line option named by ``option``, as ``file.py:function`` or ``file.py``.
    The form ``file.py`` means the function ``default_name`` of this file.
    """

    option: str
    default_name: str
    signature: str  # parameters of the callable, for messages
    positional: int = 1  # number of positional arguments in a call
    keywords: tuple[str, ...] = ()  # keyword arguments in a call

    def split(self, spec: str) -> tuple[Path, str]:
        """Split the option's value into path and function name."""
        return split_spec(spec, option=self.option, default_name=self.default_name)


REWARD_HOOK = Hook("--reward-fn-path", "reward_fn", "record")
LOADER_HOOK = Hook(
    "--dataset-loader-fn",
    "load_training_dataset",
    "dataset_path, *, default_loader, **_",
    keywords=("default_loader", "load_dataset", "load_from_disk"),
)
EVAL_LOADER_HOOK = replace(LOADER_HOOK, option="--eval-dataset-loader-fn")
AGENT_HOOK = Hook("--agent-fn", "run_agent", "ctx, batch", positional=2)
ADVANTAGE_HOOK = Hook("--advantage", "advantage_fn", "rewards, groups", positional=2)
WORKFLOW_HOOK = Hook("--workflow", "NAME", "gconfig, tokenizer")


_FILE = re.compile(r"\.py(?=:|$)")


def is_file_spec(spec: str) -> bool:
    """Whether ``spec`` has the form ``file.py`` or ``file.py:NAME``. False for a dotted name such as
    ``package.pytools.NAME``.
    """
    return _FILE.search(spec) is not None


def split_spec(spec: str, *, option: str, default_name: str) -> tuple[Path, str]:
    """Split ``file.py`` or ``file.py:function`` into path and name. Without a function, the name is ``default_name``."""
    # A colon before the suffix belongs to the path, such as the colon of a drive letter.
    end = max((match.end() for match in _FILE.finditer(spec)), default=0)
    rest, colon, name = spec[end:].partition(":")
    path = spec[:end] + rest
    if not path or (colon and not name.isidentifier()):
        forms = f"file.py or file.py:{default_name}" if default_name else "file.py:NAME"
        raise UsageError(f"{option} {spec!r} is malformed; write {forms}")
    return Path(path).expanduser(), name or default_name


def hook_file_problem(spec: str, hook: Hook) -> str:
    """Return an error message if ``spec`` is malformed or its file does not exist; otherwise an empty string.

    The file is not read.
    """
    try:
        path, name = hook.split(spec)
    except UsageError as error:
        return str(error)
    problem = f"is not a file: {path}" if path.exists() else f"file does not exist: {path}"
    return (
        "" if path.is_file() else f"{hook.option} {problem}; pass a Python file that defines {name}({hook.signature})"
    )


def import_user_file(path: Path, *, option: str) -> ModuleType:
    """Import a Python file under a unique module name. An unchanged file is imported only once.

    Raises UsageError if the file cannot be read, is not valid Python, or raises an exception during the import. If the line of
    the error is known, the message contains the line number.
    """
    path = path.resolve()
    try:
        source = path.read_bytes()
        ast.parse(source, filename=str(path))
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read: {error.strerror}; pass a readable Python file") from error
    except (SyntaxError, ValueError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{option} {path}{line} is not valid Python: {reason}; fix the file") from error
    name = f"areno_user_{path.stem}_{hashlib.sha256(str(path).encode() + source).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{option} {path} is not a Python file; pass a file that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(
            f"{option} {path}: importing the file raised {type(error).__name__}: {error}{user_frame(error, path)}; fix the "
            "file, or install the packages that it imports"
        ) from error
    return module


def user_frame(error: BaseException, path: Path) -> str:
    """Describe the code line that raised ``error``, as `` (at FILE line N: CODE)``.

    Only traceback frames whose file is in the same folder as ``path`` are considered. The innermost of these frames is
    described. If there is no such frame, the result is empty.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == path.parent]
    return f" (at {Path(frames[-1].filename).name} line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def load_hook(spec: str, hook: Hook) -> Callable[..., Any]:
    """Load the callable of a hook, and check that the callable accepts the hook's arguments.

    ``spec`` is ``file.py`` or ``file.py:function``. Raises UsageError if the callable cannot be loaded, or a check fails.
    """
    if problem := hook_file_problem(spec, hook):
        raise UsageError(problem)
    path, name = hook.split(spec)
    module, expected = import_user_file(path, option=hook.option), f"{name}({hook.signature})"
    if not hasattr(module, name):
        raise UsageError(
            f"{hook.option} {path} defines no {name}; define {expected}, or specify another function as {path}:function"
        )
    function = getattr(module, name)
    if not callable(function):
        raise UsageError(
            f"{hook.option} {path}: {name} is a {type(function).__name__}; define a function {expected} instead"
        )
    try:
        inspect.signature(function).bind(*[None] * hook.positional, **dict.fromkeys(hook.keywords))
    except ValueError:
        pass  # some C callables have no signature
    except TypeError as error:
        raise UsageError(
            f"{hook.option} {path}: {name} does not accept the arguments that areno passes: {error}; define the function as "
            f"{expected}"
        ) from error
    return function  # type: ignore[no-any-return]


def check_hook(spec: str, hook: Hook) -> None:
    """Run the checks of :func:`load_hook` in a subprocess."""
    with tempfile.TemporaryDirectory(prefix="areno-hook-") as folder:
        report = Path(folder, "problem")
        words = [*python_command(), "-c", _CHECK, spec, json.dumps(asdict(hook)), str(report)]
        code = subprocess.run(words, env={**os.environ, **search_path()}).returncode
        if code or not report.exists():
            raise UsageError(
                f"{hook.option} {spec}: importing the file ended the process with exit code {code}; fix the file"
            )
        if problem := report.read_text(encoding="utf-8"):
            raise UsageError(problem)


_CHECK = """
import json, sys
from pathlib import Path
from areno.config.hooks import Hook, load_hook
from areno.errors import UsageError
try:
    load_hook(sys.argv[1], Hook(**json.loads(sys.argv[2])))
    problem = ""
except UsageError as error:
    problem = str(error)
Path(sys.argv[3]).write_text(problem, encoding="utf-8")
"""


def named_object(spec: str, *, option: str) -> Any:
    """Import ``package.module.Name``, ``package.module:Name`` or ``file.py:Name``. Error messages start with ``option``."""
    if is_file_spec(spec):
        path, name = split_spec(spec, option=option, default_name="")
        if not path.is_file():
            raise UsageError(f"{option} file does not exist: {path}; pass the path of a Python file")
        module, source = import_user_file(path, option=option), str(path)
    else:
        source, _, name = spec.replace(":", ".").rpartition(".")
        if not source:
            raise UsageError(f"{option} {spec!r} names no module or file; write package.module.Name or file.py:Name")
        try:
            module = importlib.import_module(source)
        except Exception as error:  # a user's module may fail in any way
            raise UsageError(
                f"{option}: importing {source} raised {type(error).__name__}: {error}; check the name, and add the folder of "
                "the module to the Python path"
            ) from error
    if not name:
        raise UsageError(f"{option} {spec!r} names no object in {source}; write {source}:Name")
    if not hasattr(module, name):
        raise UsageError(
            f"{option} {spec!r}: {source} defines no {name}; write {source}:Name with a name that is defined"
        )
    return getattr(module, name)


def named_function(function: Callable[..., Any] | str, *, option: str) -> Callable[..., Any]:
    """Return a function. If ``function`` is a name such as ``package.module.f`` or ``file.py:f``, import the function.

    Raises UsageError if the name cannot be imported, or the object is not callable.
    """
    resolved = named_object(function, option=option) if isinstance(function, str) else function
    if not callable(resolved):
        shown = f" {function!r}" if isinstance(function, str) else ""
        raise UsageError(f"{option}{shown} is a {type(resolved).__name__}; pass a function, or the name of a function")
    return resolved
