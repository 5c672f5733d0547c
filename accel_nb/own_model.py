"""A user's own function, class or model -> source text with a top-level `own_model()` for the program.

Source is what a reader wants, so a function or class that stands in a cell or a file is copied with the helpers,
constants and imports it uses. What has no source of its own, such as a model that exists already, travels as
`model.pkl`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import inspect
import linecache
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accel_nb.errors import PlanError

IMPORTED = ("stdlib", "purelib", "platlib")


class OwnModel(NamedTuple):
    """`text` defines `own_model()`; `pickled` is the content of `model.pkl`, if the text reads that file."""

    text: str
    pickled: bytes | None


class _NoSourceError(Exception):
    """An object that cannot be told as source text."""


def framework_of(model: Any) -> str | None:
    """The framework of a model or model class, by the modules of its base classes; None if it shows none."""
    kind = model if isinstance(model, type) else type(model)
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "torch" in roots:
        return "pytorch"
    return "tensorflow" if roots & {"keras", "tensorflow", "tf_keras"} else None


def own_model(
    model: Any, model_args: Mapping[str, Any], *, input_shape: tuple[int, ...], outputs: int
) -> OwnModel:
    """Source for a user's model.

    A function or class is called with `model_args` and, where it takes them, with `input_shape` (one sample's) and
    `outputs` or `classes`. PlanError if its arguments do not fit, or if it can be neither read nor stored.
    """
    if not isinstance(model, type) and framework_of(model) is not None:
        if model_args:
            raise PlanError(
                "model_args", dict(model_args), "This model exists already.", "Pass its class, or leave them out."
            )
        return _stored(model, "")
    call = _arguments(model, model_args, input_shape, outputs)
    try:
        name = getattr(model, "__name__", "")
        literal = ", ".join(f"{key}={_literal(value)}" for key, value in call.items())
        source = _Source()
        source.add(model, name)
        body = f"def own_model():\n    return {name}({literal})"
        return OwnModel("\n\n\n".join([*source.parts(), body]) + "\n", None)
    except Exception:  # no source, or an object that fails in a way of its own when it is asked
        import functools

        return _stored(functools.partial(model, **call) if call else model, "()")


def _arguments(model: Any, given: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int) -> dict[str, Any]:
    """The keyword arguments of the call that makes the model."""
    offered = {"input_shape": tuple(input_shape), "outputs": outputs, "classes": outputs, "num_classes": outputs}
    try:
        signature = inspect.signature(model)
    except Exception:  # some have none, and an object may fail in any way when it is asked
        return dict(given)
    takes = {
        name
        for name, p in signature.parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name != "self"
    }
    call = {name: value for name, value in offered.items() if name in takes} | dict(given)
    try:
        signature.bind(**call)
    except TypeError as problem:
        raise PlanError(
            "model",
            model,
            f"It cannot be called with {', '.join(call) or 'no arguments'}: {problem}.",
            "Give model_args=dict(...) or default values.",
            f"{getattr(model, '__name__', 'it')}{signature}",
        ) from None
    return call


def _stored(model: Any, call: str) -> OwnModel:
    import cloudpickle

    try:
        if framework_of(model) == "pytorch" and hasattr(model, "cpu") and not isinstance(model, type):
            model = copy.deepcopy(
                model
            ).cpu()  # a worker may have no such GPU; and the user's model stays as it is
        with _by_value(cloudpickle):
            pickled = cloudpickle.dumps(model)
    except Exception as problem:
        raise PlanError(
            "model",
            model,
            f"It cannot be handed to the training process ({type(problem).__name__}: {problem}).",
            "Pass a function that makes the model.",
        ) from problem
    text = f'''def own_model():
    """The model that was handed over, from the file beside; reading it needs the package cloudpickle."""
    with open(HERE / "model.pkl", "rb") as file:
        return pickle.load(file){call}
'''
    return OwnModel("import pickle\n\n\n" + text, pickled)


@contextlib.contextmanager
def _by_value(cloudpickle: Any) -> Iterator[None]:
    """Inside: the user's own modules travel as code, since the program may run where they cannot be imported."""
    own = [
        module
        for name, module in list(sys.modules.items())
        if name not in ("__main__", "accel_nb")
        and not name.startswith("accel_nb.")
        and isinstance(module, types.ModuleType)
        and getattr(module, "__file__", None)
        and not _installed(name)
    ]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _literal(value: Any) -> str:
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError, TypeError):
        pass
    raise _NoSourceError(text)


class _Source:
    """Definitions, constants and imports that a function or class needs, each once, in an order that works."""

    def __init__(self) -> None:
        self.imports: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        self.definitions: dict[str, str] = {}
        self._open: set[str] = set()

    def parts(self) -> list[str]:
        heads = [*dict.fromkeys(self.imports.values()), *self.constants.values()]
        return ["\n".join(heads), *self.definitions.values()] if heads else list(self.definitions.values())

    def add(self, thing: Any, name: str) -> None:
        if not isinstance(thing, types.FunctionType | type) or not name.isidentifier():
            raise _NoSourceError(name)
        if name in self.definitions or name in self._open:
            return
        self._open.add(name)
        text = source_of(thing)
        if not re.match(rf"(@.*\n|async |\s)*(def|class)\s+{name}\b", text):
            raise _NoSourceError(name)  # a lambda, or a name given later
        space = _namespace(thing)
        tree = ast.parse(text)
        free = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        closure = getattr(thing, "__code__", None)
        if closure is not None and closure.co_freevars:
            raise _NoSourceError(name)
        for used in sorted(free - {name}):
            if used in space:
                self._need(used, space[used])
            elif not hasattr(builtins, used) and used not in _bound(tree):
                raise _NoSourceError(used)
        self.definitions[name] = text.rstrip()

    def _need(self, name: str, thing: Any) -> None:
        if isinstance(thing, types.ModuleType):
            if not _installed(thing.__name__):
                raise _NoSourceError(name)
            if thing.__name__ == name:
                self.imports[name] = f"import {name}"
            else:
                self.imports[name] = f"import {thing.__name__} as {name}"
            return
        module = getattr(thing, "__module__", None)
        if isinstance(thing, types.FunctionType | type) and not _installed(str(module)):
            self.add(thing, name)
        elif isinstance(module, str) and _installed(module) and hasattr(thing, "__name__"):
            known = thing.__name__
            if getattr(sys.modules.get(module), known, None) is not thing:
                raise _NoSourceError(name)
            self.imports[name] = f"from {module} import {known}" + ("" if known == name else f" as {name}")
        else:
            self.constants[name] = f"{name} = {_literal(thing)}"


def source_of(thing: Any) -> str:
    """The source text of a function or class, also of a class defined in a notebook cell.

    Python looks for a class in its module's file; a notebook has none. Its methods know their cell.
    """
    if not isinstance(thing, type):
        return textwrap.dedent(inspect.getsource(thing))
    for member in vars(thing).values():
        function = getattr(member, "__func__", member)
        if not isinstance(function, types.FunctionType) or function.__qualname__.split(".")[0] != thing.__name__:
            continue
        text = "".join(linecache.getlines(function.__code__.co_filename))
        if not text:
            continue
        line = function.__code__.co_firstlineno
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                last = node.end_lineno or node.lineno
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if first <= line <= last:
                    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : last]))
    return textwrap.dedent(inspect.getsource(thing))


def _namespace(thing: Any) -> Mapping[str, Any]:
    if isinstance(thing, types.FunctionType):
        return thing.__globals__
    for member in vars(thing).values():
        if isinstance(member, types.FunctionType):
            return member.__globals__
    return vars(sys.modules[thing.__module__])


def _bound(tree: ast.AST) -> set[str]:
    """Names that the text itself gives a value somewhere."""
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    bound |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names = [
        a.asname or a.name.split(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    ]
    handlers = [n.name for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.name]
    return bound | set(names) | set(handlers) | {"__class__"}


def _installed(module: str) -> bool:
    """Whether a module belongs to Python or to an installed package, so that any process can import it."""
    root = module.partition(".")[0]
    if root == "__main__":
        return False  # the notebook's own names, whatever file the kernel was started from
    if root in sys.stdlib_module_names:
        return True
    origin = getattr(sys.modules.get(root), "__file__", None)
    if origin is None:
        return False
    paths = [Path(sysconfig.get_path(name)).resolve() for name in IMPORTED]
    return any(path in Path(origin).resolve().parents for path in paths)
