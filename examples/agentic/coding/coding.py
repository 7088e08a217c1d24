"""Environment in which a model repairs a Python module: files, tests, and a sandbox in which the tests run.

The record has ``problem_statement``, ``files`` (``path`` and ``content``), ``FAIL_TO_PASS`` and ``PASS_TO_PASS`` (names
of tests), ``test_commands`` and ``max_turns``. The environment keeps files in memory, and discards files that a command writes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from sandbox import Outcome, Sandbox

from areno.api.agentic.environment import Answer, Environment
from areno.api.agentic.tools import ToolError

SOLVED, BETTER, NO_GAIN, WORSE = 1.0, 0.5, -0.5, -1.0
_MAX_FILE_CHARS = 20_000
# Runs the tests and prints the names of those that passed, after a word that the tested code cannot know in advance.
_RUNNER = """\
import json, sys, unittest
word = sys.stdin.readline().strip()
sys.path.insert(0, "")
class Result(unittest.TextTestResult):
    passed = []
    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed.append(test._testMethodName)
suite = unittest.defaultTestLoader.discover(".", "test_*.py")
unittest.TextTestRunner(stream=sys.stdout, resultclass=Result, verbosity=0).run(suite)
print(word + json.dumps(Result.passed))
"""


class Repair(Environment):
    """A model repairs a file until its tests pass, with ``read_file``, ``write_file`` and ``run_tests``.

    The episode ends after an answer without a tool call, or after ``max_turns`` turns.

    Args:
        sandbox: sandbox in which the tests run; by default the first method that works.
        replaying: whether a conversation is being replayed; tests do not run, because the conversation contains their results.

    Raises:
        NoSandboxError: no sandbox works on this machine.
    """

    def __init__(self, sandbox: Sandbox | None = None, *, replaying: bool = False) -> None:
        self.sandbox = sandbox or Sandbox()
        self._replaying = replaying

    def reset(self, record: Mapping[str, Any]) -> str:
        """Set up the files of ``record``."""
        self.record = record
        self.files = {file["path"]: file["content"] for file in record["files"]}
        self.written: set[str] = set()
        self.turns = 0
        names = ", ".join(sorted(self.files))
        return (
            f"{record['problem_statement']}\nFiles: {names}\n"
            "Repair it: read the module, write it again, run the tests. Then say what was wrong."
        )

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the three tools."""
        return [self.read_file, self.write_file, self.run_tests]

    def read_file(self, path: str) -> str:
        """The content of a file."""
        return self.files[self._existing(path)]

    def write_file(self, path: str, content: str) -> str:
        """Replace the content of a file, or make a new one. Tests cannot be changed."""
        if _is_test(path):
            raise ToolError(f"{path} is a test; repair the module")
        parts = PurePosixPath(path).parts
        if not re.fullmatch(r"\w[\w./-]*", path) or ".." in parts or len(self.files) > 50:
            raise ToolError(f"{path}: give a plain relative path, such as module.py")
        if len(content) > _MAX_FILE_CHARS:
            raise ToolError(f"{path}: at most {_MAX_FILE_CHARS} characters")
        if any(_inside(path, other) or _inside(other, path) for other in self.files):
            raise ToolError(f"{path}: a file cannot be a folder too")
        self.files[path] = content
        self.written.add(path)
        return f"wrote {len(content)} characters to {path}"

    async def run_tests(self) -> str:
        """Run all tests."""
        if self._replaying:
            return ""
        outcome, _ = await self._run()
        ending = f"\nstopped: limit of {outcome.stopped}" if outcome.stopped else ""
        return (outcome.output or f"exit code {outcome.code}") + ending

    def step(self, answer: Answer) -> str | None:
        """Return None, which ends the episode, after an answer without a tool call or after the last turn."""
        self.turns += 1
        return "" if answer.results and self.turns < self.record["max_turns"] else None

    async def reward(self) -> float:
        """Return the reward: 1.0 if all tests pass; 0.5 if some failing tests now pass and no passing test fails; -0.5 if
        the test results have not changed; -1.0 if a test that passed before now fails, or if the model wrote no file.
        """
        if not self.written:
            return WORSE
        passed = await self.passing_tests()
        if not set(self.record["PASS_TO_PASS"]) <= passed:
            return WORSE
        repaired = passed & set(self.record["FAIL_TO_PASS"])
        if len(repaired) == len(self.record["FAIL_TO_PASS"]):
            return SOLVED
        return BETTER if repaired else NO_GAIN

    async def passing_tests(self) -> set[str]:
        """Return the names of the tests that pass."""
        return (await self._run())[1]

    async def _run(self) -> tuple[Outcome, set[str]]:
        """Run the tests; return their output for the model and the names of the tests that passed."""
        word = secrets.token_hex(16)
        tests = {file["path"]: file["content"] for file in self.record["files"] if _is_test(file["path"])}
        outcome = await self.sandbox.run(["python", "-S", "-B", "-c", _RUNNER], {**self.files, **tests}, f"{word}\n")
        shown, _, names = outcome.output.partition(word)
        passed = set(json.loads(names)) if names and not outcome.stopped else set()
        return Outcome(outcome.code, shown.strip(), outcome.stopped), passed

    def _existing(self, path: str) -> str:
        if path not in self.files:
            raise ToolError(f"there is no file {path}; the files are {', '.join(sorted(self.files))}")
        return path


def _inside(path: str, folder: str) -> bool:
    return PurePosixPath(folder) in PurePosixPath(path).parents


def _is_test(path: str) -> bool:
    return PurePosixPath(path).name.startswith("test_")
