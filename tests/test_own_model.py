"""A user's own function, class or instance becomes source that stands alone, or a stored model."""

from __future__ import annotations

import linecache
import math
import pickle
import sys
import types

import pytest

from accel_nb.errors import PlanError
from accel_nb.own_model import own_model, source_of


@pytest.fixture
def cell():
    """Run source as a notebook cell does: in `__main__`-like globals, its text known to linecache only."""
    made = []

    def run(source, **names):
        filename = f"<cell {len(made)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        module = types.ModuleType("__main__")
        module.__dict__.update(names)
        exec(compile(source, filename, "exec"), module.__dict__)
        made.append(filename)
        return types.SimpleNamespace(**module.__dict__)

    yield run
    for filename in made:
        linecache.cache.pop(filename, None)


def made_by(own):
    space: dict = {"__name__": "program"}
    exec(own.text, space)
    return space["own_model"]()


def test_a_function_brings_its_helpers_constants_and_imports(cell):
    source = (
        "import math\nfrom collections import OrderedDict as OD\nWIDTH = 7\n\n\n"
        "def helper(n):\n    return n * WIDTH\n\n\n"
        "def net(outputs, scale=2):\n    return OD(size=helper(outputs) * scale, pi=math.pi)\n"
    )
    space = cell(source)
    own = own_model(space.net, {"scale": 3}, input_shape=(4,), outputs=5)
    assert own.pickled is None
    assert "import math" in own.text
    assert "from collections import OrderedDict as OD" in own.text
    assert dict(made_by(own)) == {"size": 5 * 7 * 3, "pi": math.pi}


def test_a_class_of_a_cell_is_told_as_source(cell):
    space = cell(
        "class Base:\n    kind = 'base'\n\n    def name(self):\n        return self.kind\n\n\n"
        "class Net(Base):\n    def __init__(self, classes, width=3):\n        super().__init__()\n"
        "        self.size = (classes, width)\n"
    )
    assert source_of(space.Net).startswith("class Net(Base):")
    own = own_model(space.Net, {}, input_shape=(4,), outputs=6)
    model = made_by(own)
    assert model.size == (6, 3)
    assert model.name() == "base"


def test_a_lambda_and_a_closure_travel_stored(cell):
    space = cell("def outer(n):\n    def inner():\n        return [n]\n    return inner\n")
    own = own_model(space.outer(8), {}, input_shape=(1,), outputs=1)
    assert pickle.loads(own.pickled)() == [8]
    own = own_model(lambda: [3], {}, input_shape=(1,), outputs=1)
    assert "pickle.load" in own.text
    assert pickle.loads(own.pickled)() == [3]


def test_arguments_that_do_not_fit_are_refused(cell):
    space = cell("def net(depth):\n    return depth\n")
    with pytest.raises(PlanError, match="depth"):
        own_model(space.net, {}, input_shape=(1,), outputs=1)
    with pytest.raises(PlanError, match="width"):
        own_model(space.net, {"width": 1}, input_shape=(1,), outputs=1)


def test_what_cannot_be_stored_is_refused():
    lock = sys._getframe()  # a frame can be neither copied nor pickled
    with pytest.raises(PlanError, match="cannot be handed"):
        own_model(lambda: lock, {}, input_shape=(1,), outputs=1)


def test_a_function_from_a_file_beside_the_notebook_is_copied(tmp_path, monkeypatch):
    (tmp_path / "nets_of_mine.py").write_text("DEPTH = 2\n\ndef net():\n    return DEPTH\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import nets_of_mine

    own = own_model(nets_of_mine.net, {}, input_shape=(1,), outputs=1)
    assert "nets_of_mine" not in own.text
    assert made_by(own) == 2
