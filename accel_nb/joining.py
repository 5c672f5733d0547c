"""A program's source as one text: `train.py` with the files beside it that it imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
# Where the files of each engine lie; what the first folder lacks comes from the next one.
ENGINES = {
    "pytorch": ("pytorch", "shared"),
    "torch_xla": ("torch_xla", "pytorch", "shared"),
    "tensorflow": ("keras", "shared"),
    "keras_jax": ("keras_jax", "keras", "shared"),
}


def joined(engine: str) -> str:
    """An engine's program with nothing chosen yet: `train.py` and the files beside it that it imports, in one."""
    sources: dict[str, str] = {}
    for folder in reversed(ENGINES[engine]):
        sources |= {path.stem: path.read_text(encoding="utf-8") for path in (PROGRAMS / folder).glob("*.py")}
    return join(sources)


def join(sources: Mapping[str, str], main: str = "train") -> str:
    """The file `main` with the content of the files that it imports, each behind those that it imports itself.

    `sources`: name of a module -> its text. `settings` comes first, where a reader looks for it.
    """
    order: list[str] = []

    def visit(name: str) -> None:
        for node in _local_imports(sources[name], sources):
            if node.module not in order:
                visit(str(node.module))
        order.append(name)

    visit(main)
    order.remove(main)
    order.sort(key=lambda name: name != "settings")
    lines = sources[main].splitlines()
    tree = ast.parse(sources[main])
    last = max(_lines_of(_imports(tree)))
    gone = _lines_of(_local_imports(sources[main], sources))
    head = [line for i, line in enumerate(lines[:last], 1) if i not in gone]
    bodies = [_body(sources[name]) for name in order]
    known: dict[str, set[str]] = {}
    for module, names in imported(tree):
        known.setdefault(module, set()).update(names)
    imports = []
    for module, names in (pair for name in order for pair in imported(ast.parse(sources[name]))):
        new = names - known.setdefault(module, set())
        known[module] |= names
        if module not in sources and module != "__future__":
            imports += [f"import {name}" for name in sorted(new)] if not module else []
            imports += [f"from {module} import {', '.join(sorted(new))}"] if module and new else []
    standard = [line for line in imports if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    first = min(n.lineno for n in _imports(tree) if not future(n)) - 1
    imports = [*head[:first], *standard, *head[first:], *(line for line in imports if line not in standard)]
    return "\n".join([*imports, "", "\n\n\n".join(bodies), "", "", *lines[last:]]) + "\n"


def _local_imports(source: str, sources: Mapping[str, str]) -> list[ast.ImportFrom]:
    return [n for n in ast.parse(source).body if isinstance(n, ast.ImportFrom) and n.module in sources]


def _imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]


def imported(tree: ast.Module) -> list[tuple[str, set[str]]]:
    """(module, names) of each `from module import names`, and ("", modules) of each `import modules`."""
    return [
        (
            (n.module or "") if isinstance(n, ast.ImportFrom) else "",
            {f"{a.name} as {a.asname}" if a.asname else a.name for a in n.names},
        )
        for n in _imports(tree)
    ]


def _body(source: str) -> str:
    """A file without its imports and its docstring."""
    tree, lines = ast.parse(source), source.splitlines()
    first = tree.body[0]
    docstring = [first] if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else []
    gone = _lines_of([*_imports(tree), *docstring])
    return "\n".join(line for i, line in enumerate(lines, 1) if i not in gone).strip("\n")


def _lines_of(nodes: Iterable[ast.stmt]) -> set[int]:
    return {i for n in nodes for i in range(n.lineno, (n.end_lineno or n.lineno) + 1)}


def future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
