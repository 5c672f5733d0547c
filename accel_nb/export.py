"""A resolved plan and the sources in `programs/` -> the text of one plain `program.py`.

The program is cut from real files that run and are tested as they stand. Four steps: join `train.py` with the
files beside it that it imports (`joining.py`), put the plan's values into the settings block, keep of each `if` on
settings only the branch that this plan takes, and drop what nothing uses any more. No code is written here but the
few lines that fetch a user's own model.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from accel_nb.errors import ProgramError
from accel_nb.joining import future, imported, joined

START, END = "# ---- settings", "# ---- end of settings"
ROOTS = ("build_model", "load_model", "train")  # what a worker and a reader call by name

_STATIC = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.In,
    ast.NotIn,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.Is,
    ast.IsNot,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Subscript,
)


def program_text(engine: str, settings: dict[str, Any], title: str, own_model: str | None = None) -> str:
    """The whole program for one run.

    `engine`: a name of ENGINES. `settings` gives a value for names of the settings block (Python literals); a name
    that the block lacks is an error, so that no choice is lost on the way. `title` is the first line of the file's
    docstring. `own_model` is source text with a top-level `own_model()` and what it needs, see `own_model.py`.
    """
    source = set_values(joined(engine), settings)
    if own_model is not None:
        source = place_own_model(source, own_model)
    source = fold(source, settings_of(source))
    source = shake(source)
    source = retitle(source, title, started_by(settings))
    source = tidy(source)
    compile(source, "program.py", "exec")  # a defect here is ours, and must not wait for the worker
    return source


def _block(source: str) -> tuple[int, int]:
    """Line indexes (0-based) of the first and the last line of the settings block."""
    lines = source.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(START)]
    ends = [i for i, line in enumerate(lines) if line.startswith(END)]
    if len(starts) != 1 or len(ends) != 1 or starts[0] > ends[0]:
        raise ProgramError(f"The program's source needs one settings block between {START!r} and {END!r}.")
    return starts[0], ends[0]


def _assignments(source: str) -> dict[str, ast.Assign]:
    first, last = _block(source)
    found = {}
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.Assign)
            and first < node.lineno - 1 < last
            and isinstance(node.targets[0], ast.Name)
        ):
            found[node.targets[0].id] = node
    return found


def settings_of(source: str) -> dict[str, Any]:
    """The values that stand in a program's settings block."""
    return {name: ast.literal_eval(node.value) for name, node in _assignments(source).items()}


def set_values(source: str, settings: dict[str, Any]) -> str:
    """The source with other values in its settings block; comments behind them stay."""
    nodes = _assignments(source)
    missing = sorted(set(settings) - set(nodes))
    if missing:
        raise ProgramError(f"The settings block has no {', '.join(missing)}. It has: {', '.join(sorted(nodes))}.")
    lines = source.splitlines()
    for name in sorted(settings, key=lambda key: nodes[key].lineno, reverse=True):
        value = nodes[name].value
        text = repr(settings[name])
        try:
            literal = ast.literal_eval(text) == settings[name]
        except (ValueError, SyntaxError):
            literal = False
        if not literal:
            raise ProgramError(f"The setting {name} has no literal form: {text}.")
        head = lines[value.lineno - 1].encode()[: value.col_offset].decode()
        tail = lines[(value.end_lineno or value.lineno) - 1].encode()[value.end_col_offset :].decode()
        lines[value.lineno - 1 : value.end_lineno] = [head + text + tail]
    return "\n".join(lines) + "\n"


def place_own_model(source: str, own_model: str) -> str:
    """The source with the user's `own_model()` in place of a stand-in of that name, else behind the settings."""
    own_model = apart(own_model, ast.parse(source))
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "own_model":
            lines = source.splitlines()
            lines[_first_line(lines, node) : node.end_lineno] = own_model.strip("\n").splitlines()
            return "\n".join(lines) + "\n"
    _, end = _block(source)
    lines = source.splitlines()
    lines[end + 1 : end + 1] = ["", "", *own_model.strip("\n").splitlines(), "", ""]
    return "\n".join(lines) + "\n"


def apart(own_model: str, program: ast.Module) -> str:
    """The user's text as it is or, where it gives a name of the program another meaning, all inside `own_model`.

    A user's `build_model` or `train` would be taken for the program's own, or the other way round.
    """
    tree = ast.parse(own_model)
    theirs = {name: ast.dump(node) for node in program.body for name in _bound_by(node)}
    mine = {name: ast.dump(node) for node in tree.body[:-1] for name in _bound_by(node)}
    if "own_model" not in mine and all(theirs.get(name, meaning) == meaning for name, meaning in mine.items()):
        return own_model
    last, lines = tree.body[-1], own_model.splitlines()
    assert isinstance(last, ast.FunctionDef)
    inner, call = lines[: _first_line(lines, last)], lines[last.body[0].lineno - 1 :]
    keep = set()  # lines that begin inside a text of several lines
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None:
            keep |= set(range(node.lineno, node.end_lineno))
    moved = [f"    {line}" if line and i not in keep else line for i, line in enumerate(inner)]
    return "\n".join(["def own_model():", *moved, *call]) + "\n"


def _bound_by(node: ast.stmt) -> list[str]:
    """The names that a top-level statement gives a meaning."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return _binds(node)


def fold(source: str, settings: dict[str, Any]) -> str:
    """The source with every `if` that only asks for settings replaced by the branch that is taken."""
    while True:
        lines = source.splitlines()
        found = list(_outermost(ast.parse(source), lines, settings))
        if not found:
            return source
        for node, alone in reversed(found):  # from below, so that the line numbers above still hold
            chosen = _branch(lines, node, taken=bool(_static_value(node.test, settings)))
            first = node.lineno - 1
            if not chosen:
                first = _comment_start(lines, first)
                if alone:
                    chosen = [" " * node.col_offset + "pass"]
            lines[first : node.end_lineno] = chosen
        source = "\n".join(lines) + "\n"


def _outermost(node: ast.AST, lines: list[str], settings: dict[str, Any]) -> Iterator[tuple[ast.If, bool]]:
    """The `if`s to fold that stand in no other one, from above; and whether each is all that its block holds."""
    for block in _blocks(node):
        foldable = [
            isinstance(child, ast.If)
            and not lines[child.lineno - 1].lstrip().startswith("elif")
            and _static_value(child.test, settings) is not None
            for child in block
        ]
        for child, fold_it in zip(block, foldable, strict=True):
            if fold_it and isinstance(child, ast.If):
                # a block whose every statement may vanish keeps one `pass` too many rather than one too few
                yield child, all(foldable) and not isinstance(node, ast.Module) and child is block[-1]
            else:
                yield from _outermost(child, lines, settings)


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    found = [getattr(node, field, None) for field in ("body", "handlers", "orelse", "finalbody")]
    return [block for block in found if isinstance(block, list) and block]


def _static_value(test: ast.expr, settings: dict[str, Any]) -> bool | None:
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    if not names or not names <= set(settings):
        return None
    if not all(isinstance(n, (*_STATIC, ast.cmpop, ast.boolop, ast.unaryop)) for n in ast.walk(test)):
        return None
    code = compile(ast.Expression(test), "<setting>", "eval")
    try:
        return bool(eval(code, {"__builtins__": {}}, settings))  # noqa: S307 - names, literals and comparisons only
    except (KeyError, IndexError, TypeError):  # an argument that this optimizer or model does not have
        return None


def _branch(lines: list[str], node: ast.If, *, taken: bool) -> list[str]:
    """The lines of one branch, moved left to where the `if` stood."""
    last = node.end_lineno or node.lineno
    other = node.orelse
    split = last  # index of the line that begins the other branch
    if other:
        if isinstance(other[0], ast.If) and lines[other[0].lineno - 1].lstrip().startswith("elif"):
            split = other[0].lineno - 1
        else:
            split = other[0].lineno - 2
            while not re.match(r"\s*else\s*:", lines[split]):
                split -= 1
    if taken:
        first = min([node.body[0].lineno, *(d.lineno for d in getattr(node.body[0], "decorator_list", []))]) - 1
        body = lines[first - _comments_above(lines, first) : split]
        return _dedent(body, node.body[0].col_offset - node.col_offset)
    if not other:
        return []
    if lines[split].lstrip().startswith("elif"):
        rest = lines[split:last]
        return [rest[0].replace("elif", "if", 1), *rest[1:]]
    return _dedent(lines[split + 1 : last], other[0].col_offset - node.col_offset)


def _comments_above(lines: list[str], index: int) -> int:
    count = 0
    while lines[index - 1 - count].lstrip().startswith("#"):
        count += 1
    return count


def _comment_start(lines: list[str], index: int) -> int:
    """Index of the first of the comment lines that stand directly above, at the same depth."""
    depth = len(lines[index]) - len(lines[index].lstrip())
    while (
        index > 0 and lines[index - 1].startswith(" " * depth + "#") and not lines[index - 1].startswith("# ----")
    ):
        index -= 1
    return index


def _dedent(lines: list[str], by: int) -> list[str]:
    return [line[by:] if line[:by].isspace() else line.lstrip() for line in lines]


def shake(source: str) -> str:
    """The source without the top-level settings, imports, functions and classes that nothing reachable uses."""
    tree = ast.parse(source)
    defined: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for name in _binds(node):
            defined.setdefault(name, []).append(node)
    waiting = [n for n in tree.body if not _binds(n) or any(name in ROOTS for name in _binds(n)) or future(n)]
    kept: set[int] = set()
    used: set[str] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in kept:
            continue
        kept.add(id(node))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id not in used:
                used.add(inner.id)
                waiting.extend(defined.get(inner.id, []))
    lines: list[str | None] = list(source.splitlines())
    text = source.splitlines()
    for node in tree.body:
        if id(node) not in kept:
            for i in range(_comment_start(text, _first_line(text, node)), node.end_lineno or node.lineno):
                lines[i] = None
        elif isinstance(node, ast.ImportFrom) and not future(node):
            names = [a for a in node.names if (a.asname or a.name) in used]
            for i in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[i] = None
            joined = ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in names)
            lines[node.lineno - 1] = f"from {node.module} import {joined}"
    return "\n".join(line for line in lines if line is not None) + "\n"


def _binds(node: ast.stmt) -> list[str]:
    """The names that a top-level statement only defines; none for one that must stay for what it does."""
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    return []


def _first_line(lines: list[str], node: ast.stmt) -> int:
    """Index of a definition's first line, decorators and the comments right above included."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
    return _comment_start(lines, first)


def started_by(settings: Mapping[str, Any]) -> str:
    """The command that starts a program: strategies with a process per device want a launcher, or a variable."""
    strategy, nodes = settings.get("STRATEGY"), settings.get("NODES", 1)
    if strategy in ("ddp", "fsdp"):
        several = f"--nnodes={nodes} ..." if nodes > 1 else "--standalone"
        return f"torchrun {several} --nproc-per-node={settings['DEVICES']} program.py"
    return "TF_CONFIG=... python program.py" if strategy == "multi_worker" else "python program.py"


def retitle(source: str, title: str, start: str = "python program.py") -> str:
    """The source with `title` as the first line of its docstring, which also tells how the program is started."""
    tree = ast.parse(source)
    first = tree.body[0]
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        raise ProgramError("The program's source needs a docstring on top.")
    lines = source.splitlines()
    text = str(first.value.value).replace("train.py", "program.py").replace("python program.py", start)
    rest = text.split("\n", 1)
    safe = title.replace("\\", "/").replace('"', "'")
    text = f'"""{safe}\n{rest[1]}"""' if len(rest) > 1 else f'"""{safe}"""'
    lines[: first.end_lineno] = text.splitlines()
    return "\n".join(lines) + "\n"


def tidy(source: str) -> str:
    """Imports in two sorted groups, two empty lines between definitions, one at most inside them."""
    tree = ast.parse(source)
    lines = source.splitlines()
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) and not future(n)]
    # only the leading run: an import that stands lower stands there for a reason
    leading = [n for n in imports if all(not _binds_late(m, n) for m in tree.body)]
    if leading:
        merged: dict[str, set[str]] = {}
        for module, names in imported(ast.Module(list(leading), [])):
            merged.setdefault(module, set()).update(names)
        texts = {f"import {name}" for name in merged.pop("", ())}
        texts |= {f"from {module} import {', '.join(sorted(names))}" for module, names in merged.items()}
        own = sorted((t for t in texts if t.split()[1].split(".")[0] in sys.stdlib_module_names), key=_import_key)
        other = sorted(texts - set(own), key=_import_key)
        at = leading[0].lineno - 1
        drop = {i for n in leading for i in range(n.lineno - 1, n.end_lineno or n.lineno)}
        block = [*own, *([""] if own and other else []), *other, ""]
        lines = [*lines[:at], *block, *(line for i, line in enumerate(lines) if i >= at and i not in drop)]
    lines = _once(lines)
    text = "\n".join(line.rstrip() for line in lines)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    text = re.sub(r"\n{3,}(?=[ \t])", "\n\n", text)  # inside a function
    text = re.sub(r":\n\n+(?=[ \t]+\S)", ":\n", text)  # nothing right under a header
    head, settings, rest = text.partition(START)
    text = re.sub(r"\n{3,}", "\n\n", head) + settings + rest
    return text.strip("\n") + "\n"


def _once(lines: list[str]) -> list[str]:
    """The lines without a top-level import that stands there already."""
    seen: set[str] = set()
    kept = []
    for line in lines:
        if line.startswith(("import ", "from ")):
            if line in seen:
                continue
            seen.add(line)
        kept.append(line)
    return kept


def _binds_late(earlier: ast.stmt, node: ast.stmt) -> bool:
    """Whether a statement that is no import stands before `node` and does something."""
    docstring = isinstance(earlier, ast.Expr) and isinstance(earlier.value, ast.Constant)
    passive = docstring or isinstance(earlier, ast.Import | ast.ImportFrom)
    return earlier.lineno < node.lineno and not passive


def _import_key(text: str) -> tuple[bool, str]:
    return text.startswith("from"), text.split()[1].lower()
