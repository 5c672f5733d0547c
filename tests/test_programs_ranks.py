"""The PyTorch program on several ranks: the run of one device, by DDP and by FSDP, on CPUs joined by gloo."""

from __future__ import annotations

import ast
import contextlib
import csv
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

import rank_scenarios  # noqa: E402 - needs torch.distributed
from pytorch_program import FOLDER, digits, load, plain_torch  # noqa: F401, E402 - a fixture
from rank_scenarios import ADAM, SCENARIOS, scenario  # noqa: E402
from torch import nn  # noqa: E402

from accel_nb import export  # noqa: E402

TESTS = Path(__file__).parent
# What runs where; each start of processes costs seconds. FSDP differs from DDP in the weights, not in the samples.
TWO = [f"ddp:{name}" for name in SCENARIOS] + [
    f"fsdp:{name}"
    for name in ("uneven", "one small batch", "odd", "accumulate", "resnet50", "own", "fp16 overflow",
                 "cnn again", "own again", "own in two", "stop", "diverges")
]  # fmt: skip
FOUR = ["ddp:one row", "ddp:accumulate little", "ddp:own", "fsdp:one row", "fsdp:cnn", "fsdp:own again"]
EXACT = {"rtol": 2e-6, "atol": 1e-6}  # float32, added up in another order
HALF = {"rtol": 1e-3, "atol": 1e-3}  # bfloat16 and float16 round at the third digit


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


def torchrun(count, *command, cwd=None, **more):
    """A started torchrun with `count` processes of one thread each."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
        "PYTHONPATH": str(TESTS),
        **more,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_ranks(home, count, wanted):
    """(strategy, name) -> what each rank tells."""
    ports = " ".join(free_ports(2 * len(wanted)))
    process = torchrun(count, str(TESTS / "rank_scenarios.py"), str(home), *wanted, PORTS=ports)
    _, log = process.communicate(timeout=300)
    assert process.returncode == 0, log[-5000:]
    told = {}
    for strategy, name in (item.split(":") for item in wanted):
        folder = home / f"{name}-{strategy}-{count}"
        told[strategy, name] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    return told


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    yield folder
    shutil.rmtree(folder)  # the weights of several ResNets


@pytest.fixture(scope="module")
def alone(home):
    """The runs on one device, by their names."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    told = {name: scenario(home, name, "single") for name in SCENARIOS}
    torch.set_num_threads(threads)
    return told


@pytest.fixture(scope="module")
def two(home):
    return run_ranks(home, 2, TWO)


@pytest.fixture(scope="module")
def four(home):
    return run_ranks(home, 4, FOUR)


def all_of(told, event):
    return [values for name, values in told["events"] if name == event]


def column(told, name):
    return [value for values in all_of(told, "batch") for value in values[name]]


def epochs(told, *names):
    return [[values[name] for name in names if name in values] for values in all_of(told, "epoch")]


def weights(home, name, strategy, count, file="model.pt"):
    return torch.load(home / f"{name}-{strategy}-{count}" / "out" / file, weights_only=True)


def steps_of(name):
    """How many steps a scenario has."""
    samples, _, settings = SCENARIOS[name]
    settings = rank_scenarios.BASE | settings
    steps = samples // settings["BATCH_SIZE"] + (
        samples % settings["BATCH_SIZE"] > 0 and "DROP_LAST" not in settings
    )
    return 13 if name == "stop" else steps * settings["EPOCHS"]


def differs(home, strategy, name, ranks, one):
    """What differs between a run on several ranks and the same run on one device; "" if nothing does."""
    near = HALF if name.startswith(("bf16", "fp16")) else EXACT
    told = ranks[0]
    try:
        assert len(column(told, "loss")) == steps_of(name)
        np.testing.assert_allclose(column(told, "loss"), column(one, "loss"), **near)
        if SCENARIOS[name][2].get("TASK") != "regression":
            np.testing.assert_allclose(column(told, "accuracy"), column(one, "accuracy"), rtol=1e-6)
        shown = ("loss", "accuracy", "val_loss", "val_accuracy")
        np.testing.assert_allclose(epochs(told, *shown), epochs(one, *shown), **near)
        saved, expected = weights(home, name, strategy, len(ranks)), weights(home, name, "single", 1)
        assert list(saved) == list(expected)
        for key, value in saved.items():
            np.testing.assert_allclose(value, expected[key], **near, err_msg=key)
    except AssertionError as error:
        return f"{strategy}:{name}: {error}"
    return ""


UNLIKE = ("cnn dropout", "fp16 overflow", "diverges")  # not the same numbers as on one device, by their nature


@pytest.mark.parametrize("count", [2, 4])
def test_a_run_on_several_ranks_is_the_run_on_one_device(count, home, alone, request):
    ranks = request.getfixturevalue({2: "two", 4: "four"}[count])
    problems = [
        differs(home, strategy, name, told, alone[name])
        for (strategy, name), told in ranks.items()
        if name not in UNLIKE
    ]
    assert not [problem for problem in problems if problem]


def test_all_ranks_end_with_the_same_weights(two, four):
    for (strategy, name), told in [*two.items(), *four.items()]:
        if strategy == "ddp" and name != "diverges":  # in FSDP each has a part only
            assert len({json.dumps(one["saved"]) for one in told}) == 1, name
            assert "model.pt" in told[0]["saved"]


def test_each_epoch_has_a_new_order_that_all_ranks_share_out(two, four, alone):
    for (_, name), told in [*two.items(), *four.items()]:
        if "ACCUMULATE" in SCENARIOS[name][2] or name in ("diverges", "own in two"):
            continue
        # as many steps everywhere, whose rows are together those that one device has in that step
        assert len({len(one["rows"]) for one in told}) == 1
        steps = [
            sorted(row for rows in parts for row in rows)
            for parts in zip(*(one["rows"] for one in told), strict=True)
        ]
        assert steps == [sorted(rows) for rows in alone[name]["rows"]]
        sizes = [[len(rows) for rows in parts] for parts in zip(*(one["rows"] for one in told), strict=True)]
        assert all(max(parts) - min(parts) <= 1 for parts in sizes)
    told, samples = two["ddp", "uneven"], SCENARIOS["uneven"][0]
    halves = [[one["rows"][: len(one["rows"]) // 2], one["rows"][len(one["rows"]) // 2 :]] for one in told]
    for epoch in (0, 1):
        seen = [row for half in halves for rows in half[epoch] for row in rows]
        assert sorted(seen) == list(range(samples))
    assert halves[0][0] != halves[0][1]


def test_parts_of_a_share_hold_each_row_once(two, four):
    for told, name in (
        (two["ddp", "accumulate"], "accumulate"),
        (four["ddp", "accumulate little"], "accumulate little"),
    ):
        assert len({len(one["rows"]) for one in told}) == 1
        rows = sorted(row for one in told for part in one["rows"] for row in part)
        assert rows == sorted([*range(SCENARIOS[name][0])] * 2)  # two epochs


def test_streaming_gives_the_same_bits_as_data_on_the_device(two):
    for streamed, kept in (("streamed", "uneven"), ("streamed images", "cnn")):
        for name in ("loss", "accuracy"):
            assert column(two["ddp", streamed][0], name) == column(two["ddp", kept][0], name)
        shown = ("loss", "accuracy", "val_loss", "val_accuracy")
        assert epochs(two["ddp", streamed][0], *shown) == epochs(two["ddp", kept][0], *shown)


def test_rank_0_tells_and_is_asked_the_others_only_join(two, alone):
    for (strategy, name), told in two.items():
        if name in rank_scenarios.RESUMED:
            continue
        assert [event for event, _ in told[0]["events"]][:4] == ["joining", "joined", "model", "started"]
        assert [event for event, _ in told[1]["events"]] == ["joining", "joined"]
        assert told[0]["asked"] > 0
        assert told[1]["asked"] == 0
        started = all_of(told[0], "started")[0]
        size = SCENARIOS[name][2].get("BATCH_SIZE", 32)
        assert (started["replicas"], started["strategy"], started["backend"]) == (2, strategy, "gloo")
        assert (started["device"], started["per_replica"]) == ("cpu", -(-size // 2))
    assert "replicas" not in all_of(alone["uneven"], "started")[0]
    started = all_of(alone["accumulate"], "started")[0]
    assert (started["replicas"], started["strategy"], started["per_replica"]) == (1, "single", 32)


def test_dropout_differs_between_ranks(two, alone):
    told = two["ddp", "cnn dropout"]
    assert len({one["seed"] for one in told} | {alone["cnn dropout"]["seed"]}) == 3
    assert np.isfinite(column(told[0], "loss")).all()


def test_fsdp_keeps_a_part_of_the_weights_on_each_rank(two, four):
    for (strategy, _), told in [*two.items(), *four.items()]:
        if strategy == "fsdp":
            parts, whole = [one["kept"][0] for one in told], told[0]["kept"][1]
            assert sum(parts) == whole
            assert max(parts) < 0.7 * whole


def test_an_overflow_on_one_rank_is_a_step_that_all_leave_out(home, two, alone):
    for strategy in ("ddp", "fsdp"):
        told = two[strategy, "fp16 overflow"][0]
        assert column(told, "loss")[1] > 1e20
        assert np.isfinite(column(told, "loss")).all()
        expected = weights(home, "fp16 overflow", "single", 1)
        for key, value in weights(home, "fp16 overflow", strategy, 2).items():
            np.testing.assert_allclose(value, expected[key], **HALF)


def test_all_ranks_stop_at_the_same_step_and_what_they_leave_goes_on_on_one_device(home, two, alone):
    x, y = (torch.from_numpy(array) for array in digits(301, 0)[:2])
    order = np.random.default_rng([0, 1]).permutation(301)
    single = weights(home, "stop", "single", 1, "checkpoint.pt")
    for strategy in ("ddp", "fsdp"):
        told = two[strategy, "stop"]
        assert [len(one["rows"]) for one in told] == [13, 13]
        assert len(column(told[0], "loss")) == 13
        assert told[0]["events"][-1][0] == "checkpoint"
        assert sorted(path.name for path in (home / f"stop-{strategy}-2" / "out").iterdir()) == [
            "checkpoint.pt",
            "model.pt",
        ]
        state = weights(home, "stop", strategy, 2, "checkpoint.pt")
        assert state.keys() == single.keys()
        assert {k: state[k] for k in ("step", "epoch", "position", "learning_rate")} == {
            "step": 13, "epoch": 2, "position": 3, "learning_rate": 0.003
        }  # fmt: skip
        assert json.dumps(state["optimizer"], default=kind) == json.dumps(single["optimizer"], default=kind)
        program = load(home / "program.py")
        vars(program).update(rank_scenarios.BASE, INPUT_SHAPE=(64,))
        model = program.build_model()
        model.load_state_dict(state["model"], strict=True)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        optimizer.load_state_dict(state["optimizer"])
        for step in range(13, 20):
            rows = torch.from_numpy(order[32 * (step - 10) : 32 * (step - 9)])
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            assert loss.item() == pytest.approx(column(alone["uneven"], "loss")[step], rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def kind(tensor):
    """A tensor as JSON can hold it: what it is, not what it holds."""
    return [str(tensor.dtype), list(tensor.shape), str(tensor.device), type(tensor).__name__]


def test_a_new_learning_rate_is_in_force_on_all_ranks_from_the_same_step_on(two):
    told = two["ddp", "rate"][0]
    assert [values["learning_rate"] for values in all_of(told, "batch")] == [0.003] * 6 + [0.001] * 14


def test_a_run_that_diverges_ends_on_all_ranks_with_the_same_words(two, alone):
    for strategy in ("ddp", "fsdp"):
        errors = {one["error"] for one in two[strategy, "diverges"]}
        assert errors == {alone["diverges"]["error"]}
        assert re.match(r"The loss is (nan|inf) at step \d", errors.pop())


# ---- as a person starts it

OWN = """
import os

CALLS = []


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        CALLS.append(1)
        if len(CALLS) > 3 and os.environ["RANK"] == "1":
            raise ArithmeticError("rank 1 has had enough")
        return self.out(x)


def own_model():
    return Own()
"""


@pytest.fixture(scope="module")
def programs(home):
    """Exported programs, all started at the same time, with the port held that everybody takes by default."""
    settings = {
        "MODEL_ARGS": rank_scenarios.PLAIN, "INPUT_SHAPE": (64,), "BATCH_SIZE": 32, "EPOCHS": 2, "DEVICES": 2,
        "OPTIMIZER_ARGS": ADAM,
    }  # fmt: skip
    started = {}
    with contextlib.ExitStack() as stack:
        default = stack.enter_context(socket.socket())
        with contextlib.suppress(OSError):  # held by somebody else: as good
            default.bind(("127.0.0.1", 29500))
            default.listen()
        for name, more in {
            "single": {}, "ddp": {"STRATEGY": "ddp"}, "fsdp": {"STRATEGY": "fsdp"},
            "raises": {"STRATEGY": "ddp", "MODEL": "own"},
        }.items():  # fmt: skip
            folder = home / f"program {name}"
            (folder / "data").mkdir(parents=True)
            for file, array in zip(("x_train", "y_train", "x_val", "y_val"), digits(301, 70), strict=True):
                np.save(folder / "data" / f"{file}.npy", array)
            text = export.program_text(
                "pytorch", {**settings, **more}, "Title.", OWN if name == "raises" else None
            )
            (folder / "program.py").write_text(text, encoding="utf-8")
            if name != "single":
                started[name] = stack.enter_context(torchrun(2, "program.py", "history.csv", cwd=folder))
        single = imported(home / "program single")
        single.train(single.csv_report(home / "program single" / "history.csv"))
        done = {name: (*process.communicate(timeout=120), process.returncode) for name, process in started.items()}
    return {name: (home / f"program {name}", *rest) for name, rest in done.items()}


def imported(folder):
    """The exported program in a folder, as a module."""
    program = types.ModuleType("program")
    program.__file__ = str(folder / "program.py")
    exec(compile((folder / "program.py").read_text(encoding="utf-8"), program.__file__, "exec"), vars(program))
    return program


def history(folder):
    with open(folder / "history.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_exported_program_writes_under_torchrun_what_a_single_one_writes(programs, strategy):
    folder, out, log, code = programs[strategy]
    assert code == 0, log[-3000:]
    lines = [line for line in out.splitlines() if not line.startswith("[Gloo]")]  # what some versions add
    assert [line.split()[:2] for line in lines] == [["epoch", "1"], ["epoch", "2"]]
    rows, expected = history(folder), history(folder.parent / "program single")
    assert len(rows) == 20
    for name in ("step", "epoch", "loss", "accuracy", "val_loss", "val_accuracy"):
        here, there = ([float(row[name] or "nan") for row in table] for table in (rows, expected))
        np.testing.assert_allclose(here, there, **EXACT)
    program, single = imported(folder), imported(folder.parent / "program single")
    with torch.no_grad():
        x = torch.from_numpy(digits(301, 70)[2])
        outputs = program.load_model(folder / "repeat" / "model.pt")(x)
        expected = single.load_model(single.HERE / "repeat" / "model.pt")(x)
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_started_alone_it_says_how_to_start(programs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program.py"])
    sentence = (
        "This program runs as one process per device: "
        "start it with torchrun --standalone --nproc-per-node=2 program.py"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
        imported(programs["ddp"][0]).train()
    assert capsys.readouterr().out == ""


def test_a_rank_that_raises_ends_them_all(programs):
    _, _, log, code = programs["raises"]
    assert code == 1
    assert "ArithmeticError: rank 1 has had enough" in log
    folder = str(programs["raises"][0].parent)
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.cwd().startswith(folder):
                left.append(process.cmdline())
    assert not left


def test_a_program_for_one_device_has_no_trace_of_ranks():
    text = export.program_text("pytorch", {"STRATEGY": "single"}, "Title.")
    for trace in ("rank", "dist", "torchrun", "STRATEGY", "ACCUMULATE", "RANK"):
        assert trace not in text, trace
    text = export.program_text("pytorch", {"STRATEGY": "ddp", "DEVICES": 2}, "Title.")
    for trace in ("fully_shard", "nccl", "BatchNorm", "ACCUMULATE", "DTensor", "cuda", "idle = len"):
        assert trace not in text, trace


def test_every_way_to_spread_gives_a_program_without_loose_ends(tmp_path):
    """Each text names nothing that it lacks, imports nothing in vain and does not ask for its settings."""
    from accel_nb.plan import MODEL_ARGS, OPTIMIZER_ARGS

    choices = itertools.product(
        ("ddp", "fsdp", "single"),
        ("mlp", "cnn", "resnet50", "own"),
        ("cpu", "gpu", "tpu"),
        ("fp32", "fp16"),
        (1, 2),
    )
    names = "MODEL|STRATEGY|NODES|ACCELERATOR|PRECISION|ACCUMULATE|COMPILE|OPTIMIZER|TASK|DATA_ON_DEVICE"
    for i, (strategy, model, accelerator, precision, accumulate) in enumerate(choices):
        if i % 7:  # 7 shares no factor with the numbers of choices: each pair of choices still meets
            continue
        optimizer = ("adam", "adamw", "sgd", "rmsprop")[i % 4]
        settings = {
            "STRATEGY": strategy, "MODEL": model, "MODEL_ARGS": MODEL_ARGS.get(model, {}), "PRECISION": precision,
            "INPUT_SHAPE": (28, 28, 1), "ACCELERATOR": accelerator, "ACCUMULATE": accumulate,
            "OPTIMIZER": optimizer, "OPTIMIZER_ARGS": OPTIMIZER_ARGS[optimizer],
            "TASK": ("classification", "regression")[i // 4 % 2],
            "ACTIVATION_CHECKPOINTING": bool(i // 2 % 2), "COMPILE": bool(i // 3 % 2), "DEVICES": 2,
            "DATA_ON_DEVICE": bool(i // 7 % 2), "VALIDATION": bool(i % 3), "NODES": 1 + i % 2,
        }  # fmt: skip
        own = "def own_model():\n    return None\n" if model == "own" else None
        text = export.program_text("pytorch", settings, "Title.", own)
        (tmp_path / f"program_{i}.py").write_text(text, encoding="utf-8")
        tests = [ast.unparse(node.test) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If)]
        assert not [test for test in tests if re.search(rf"\b({names})\b", test)]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,B006,PLE", "--no-cache"]
    check = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout[-3000:]
