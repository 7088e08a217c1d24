"""Rules of the code: which packages may import which, how long files and functions may be, what loads without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import areno.api

REPO = Path(__file__).parents[2]
# A package may import itself and those below it.
PACKAGES = [
    "cli",
    "viewer",  # a server that shows what runs wrote
    "tools",  # standalone programs, like commands: they read what a run wrote, and nothing imports them
    "quickstart",
    "experiments",
    "api",
    "rollouts",
    "rewards",
    "serving",
    "training",
    "engine",
    "launch",
    "name_resolve",
    "reports",  # reads what runs wrote
    "observability",
    "algorithms",  # one file each, found by name
    "loss_fns",
    "text",
    "types",
    "config",
    "storage",
    "spec",
]
HEAVY = ("torch", "transformers", "datasets")
# Files that name a higher package in a "module:attribute" string, with the reason.
NAMED_AS_TEXT = {
    "areno/config/algorithms.py": "the registry names trainers and losses, so that looking one up imports no torch",
    "areno/config/advantages.py": "the registry names estimators, for the same reason",
}


PACKAGES_WITH_LISTS = [
    path.parent
    for path in sorted((REPO / "areno").rglob("__init__.py"))
    if "\n- ``" in path.read_text(encoding="utf-8")
]


def sources() -> list[Path]:
    return sorted((REPO / "areno").rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: Path) -> str | None:
    """Package of a file; None for the top-level files of areno."""
    parts = path.relative_to(REPO / "areno").parts
    return parts[0] if len(parts) > 1 else None


def imports(tree: ast.AST) -> Iterator[str]:
    """Absolute dotted names that a tree imports, each with the imported attribute if there is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import, except those under ``if TYPE_CHECKING``."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Public classes and functions of a module, and the public methods of its public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


def test_every_package_is_in_the_list():
    assert {package_of(path) for path in sources()} - {None} <= set(PACKAGES)


def test_there_are_no_circular_imports():
    """Neither at import time, nor in a function, nor only for types."""
    modules = {
        name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in sources()
    }

    def module_of(name: str) -> str:
        return name if name in modules or "." not in name else module_of(name.rpartition(".")[0])

    graph = {name: {module_of(target) for target in imports(tree_of(path))} - {name} for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_imports_go_downward_only():
    upward = []
    for path in sources():
        package = package_of(path)
        for name in imports(tree_of(path)) if package else ():
            target = name.split(".")[1] if name.startswith("areno.") else None
            target = "api" if target in areno.api.__all__ else target  # as in `from areno import Trainer`
            if target in PACKAGES and PACKAGES.index(target) < PACKAGES.index(str(package)):
                upward.append(f"{name_of(path)} imports {name}")
    assert upward == []


def test_only_listed_files_name_higher_packages_in_strings():
    naming = set()
    for path in sources():
        package = package_of(path)
        texts = [n.value for n in ast.walk(tree_of(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        targets = [match[1] for text in texts if (match := re.fullmatch(r"areno\.(\w+)[\w.]*:\w+", text))]
        if package and any(PACKAGES.index(target) < PACKAGES.index(package) for target in targets):
            naming.add(name_of(path))
    assert naming == set(NAMED_AS_TEXT)


@pytest.mark.parametrize("package", ["config", "storage", "types", "errors"])
def test_the_lowest_packages_import_nothing_heavy(package):
    files = [path for path in sources() if package in (package_of(path), path.stem)]
    assert files
    for path in files:
        names = [name for statement in module_level(tree_of(path)) for name in imports(statement)]
        assert not [name for name in names if name.split(".")[0] in HEAVY], path


@pytest.mark.parametrize(
    "module",
    [
        "areno",
        "areno.api",
        "areno.api.trainer",
        "areno.api.backend.base",
        "areno.config",
        "areno.types",
        "areno.cli.main",
    ],
)
def test_importing_the_public_modules_loads_neither_torch_nor_a_model(module):
    code = (
        f"import sys, {module}\n"
        f"heavy = [name for name in {(*HEAVY, 'areno.engine.model', 'areno.engine.engine')!r} if name in sys.modules]\n"
        "print(heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_files_have_fewer_than_500_lines():
    assert [name_of(p) for p in sources() if len(p.read_text(encoding="utf-8").splitlines()) >= 500] == []


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The first line that counts: a kernel has a parameter for every stride and size, so it counts from its first statement."""
    kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    return node.body[0].lineno if kernel else node.lineno


def test_functions_have_fewer_than_80_lines_and_nine_in_ten_fewer_than_30():
    lengths = {
        f"{name_of(path)}:{node.name}": (node.end_lineno or node.lineno) - first_line(node) + 1
        for path in sources()
        for node in functions(tree_of(path))
    }
    assert [name for name, length in lengths.items() if length >= 80] == []
    assert sum(length < 30 for length in lengths.values()) >= 0.9 * len(lengths)


def test_everything_public_has_a_docstring():
    missing = [name_of(path) for path in sources() if not ast.get_docstring(tree_of(path))]
    for path in sources():
        for name, node in public_definitions(tree_of(path).body):
            if not ast.get_docstring(node):  # type: ignore[arg-type]
                missing.append(f"{name_of(path)}: {name}")
    assert missing == []


def test_no_code_is_marked_as_unfinished():
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b")
    assert [name_of(path) for path in sources() if marks.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("package", PACKAGES_WITH_LISTS, ids=lambda path: path.relative_to(REPO).as_posix())
def test_the_docstring_of_a_package_lists_all_its_modules(package):
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert modules - set(re.findall(r"``(\w+)``", docstring)) == set()
