"""Out of memory, told apart from everything else: recorded words of the frameworks, and real shortages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import accel_nb as anb
from accel_nb import machine, memory_killer, process_memory
from accel_nb.lost import lost_event
from accel_nb.out_of_memory import in_log, recognise, shortage

MIB, GIB = 2**20, 2**30
TORCH, TF, JAX = {"torch", "builtins"}, {"tensorflow", "builtins"}, {"jaxlib", "jax", "builtins"}
RUNTIME = {"RuntimeError", "Exception"}

# What the frameworks say: names of the error's types, packages, text -> place, bytes needed, free and in all.
WORDS = {
    "torch.OutOfMemoryError": (
        {"OutOfMemoryError", *RUNTIME},
        TORCH,
        (
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
            "14.75 GiB of which 11.06 MiB "
            "is free. Process 4711 has 14.73 GiB memory in use. Of the allocated memory "
            "13.49 GiB is allocated by PyTorch"
        ),
        ("gpu", 20 * GIB, 11.06 * MIB, 14.75 * GIB),
    ),
    "an older PyTorch": (
        RUNTIME,
        TORCH,
        (
            "CUDA out of memory. Tried to allocate 1.95 GiB (GPU 0; 14.76 GiB total "
            "capacity; 12.64 GiB already "
            "allocated; 1.33 GiB free; 12.70 GiB reserved in total by PyTorch)"
        ),
        ("gpu", 1.95 * GIB, 1.33 * GIB, 14.76 * GIB),
    ),
    "ROCm": (RUNTIME, TORCH, "HIP out of memory. Tried to allocate 512.00 MiB.", ("gpu", 512 * MIB, None, None)),
    "torch.AcceleratorError": (
        {"AcceleratorError", *RUNTIME},
        TORCH,
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
        ("gpu", None, None, None),
    ),
    "cuBLAS": (
        RUNTIME,
        {"builtins"},
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ("gpu", None, None, None),
    ),
    "cuDNN": (RUNTIME, TORCH, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", ("gpu", None, None, None)),
    "cuDNN's workspace": (
        RUNTIME,
        TORCH,
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ("gpu", None, None, None),
    ),
    "NCCL": (
        {"DistBackendError", *RUNTIME},
        TORCH,
        (
            "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error\nLast error:\nCuda "
            "failure 2 'out of memory'"
        ),
        ("gpu", None, None, None),
    ),
    "an Apple GPU": (
        RUNTIME,
        TORCH,
        (
            "MPS backend out of memory (MPS allocated: 17.35 GB, other allocations: 384.00 "
            "KB, max allowed: 18.13 GB). "
            "Tried to allocate 1.25 GB on private pool."
        ),
        ("mps", 1.25 * GIB, None, 18.13 * GIB),
    ),
    "PyTorch's CPU allocator": (
        RUNTIME,
        {"builtins"},
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
            "allocate memory: you tried to "
            "allocate 943718400 bytes. Error code 12 (Cannot allocate memory)"
        ),
        ("cpu", 943718400, None, None),
    ),
    "torch.compile": (
        {"BackendCompilerFailed", "TorchDynamoException", *RUNTIME},
        TORCH,
        (
            "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to "
            "allocate 2.00 GiB. GPU 0 has a "
            "total capacity of 14.75 GiB of which 1.50 GiB is free."
        ),
        ("gpu", 2 * GIB, 1.5 * GIB, 14.75 * GIB),
    ),
    "Python": ({"MemoryError", "Exception"}, {"builtins"}, "", ("cpu", None, None, None)),
    "C++ through pybind": (
        {"MemoryError", "Exception"},
        {"builtins"},
        "std::bad_alloc",
        ("cpu", None, None, None),
    ),
    "NumPy": (
        {"_ArrayMemoryError", "MemoryError"},
        {"numpy", "builtins"},
        "Unable to allocate 22.4 GiB for an array with shape (1000000000, 3) and data type float64",
        ("cpu", 22.4 * GIB, None, None),
    ),
    "TensorFlow on a GPU": (
        {"ResourceExhaustedError", "OpError"},
        TF,
        (
            "Graph execution error:\nOOM when allocating tensor with shape[4096,112,112,64] and type float on "
            "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc\n\t "
            "[[{{node Relu}}]] [Op:__inference]"
        ),
        ("gpu", 4096 * 112 * 112 * 64 * 4, None, None),
    ),
    "TensorFlow on a CPU": (
        {"ResourceExhaustedError", "OpError"},
        TF,
        (
            "{{function_node x}} OOM when allocating tensor with shape[8192,8192] and type "
            "half on /job:localhost/"
            "replica:0/task:0/device:CPU:0 by allocator cpu [Op:MatMul]"
        ),
        ("cpu", 8192 * 8192 * 2, None, None),
    ),
    "TensorFlow's copy": (
        {"InternalError", "OpError"},
        TF,
        (
            "Failed copying input tensor from CPU:0 to GPU:0 in order to run Identity: Dst "
            "tensor is not initialized."
        ),
        ("gpu", None, None, None),
    ),
    "TensorFlow's start": (
        {"InternalError", "OpError"},
        TF,
        "CUDA runtime implicit initialization on GPU:0 failed. Status: out of memory",
        ("gpu", None, None, None),
    ),
    "XLA on a GPU": (
        {"XlaRuntimeError", *RUNTIME},
        JAX,
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
        ("", 16 * GIB, None, None),
    ),
    "JAX on a CPU": (
        {"JaxRuntimeError", *RUNTIME},
        JAX,
        "RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.",
        ("", GIB, None, None),
    ),
    "JAX on a CPU, while it computes": (
        {"JaxRuntimeError", *RUNTIME},
        JAX,
        "INTERNAL: Error dispatching computation: Out of memory allocating 3600000000 bytes.",
        ("", 3_600_000_000, None, None),
    ),
    "a TPU's compiler": (
        {"XlaRuntimeError", *RUNTIME},
        JAX,
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
            "memory space hbm. Used 21.07G of "
            "15.48G hbm. Exceeded hbm capacity by 5.59G."
        ),
        ("tpu", 21.07 * GIB, None, 15.48 * GIB),
    ),
    "torch_xla": (
        RUNTIME,
        {"builtins"},
        (
            "Bad StatusOr access: RESOURCE_EXHAUSTED: Error allocating device buffer: "
            "Attempting to allocate 512.00M. "
            "That was not possible. There are 339.53M free.; (0x0x0_HBM0)"
        ),
        ("tpu", 512 * MIB, 339.53 * MIB, None),
    ),
}

# What speaks of memory and is no shortage of it, or of another resource.
OTHERS = [
    ({"RuntimeError"}, {"builtins"}, "the cache is out of memory slots"),
    ({"RuntimeError"}, {"builtins"}, "memory format option is only supported by strided tensors"),
    ({"RuntimeError"}, TORCH, "CUDA error: an illegal memory access was encountered"),
    ({"ValueError"}, {"builtins"}, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    ({"OutOfMemoryError"}, {"shop"}, "no more memory cards in stock"),
    ({"ResourceExhaustedError", "OpError"}, TF, "RESOURCE_EXHAUSTED: /tmp/x.data; No space left on device"),
    ({"ResourceExhaustedError", "OpError"}, TF, "Received message larger than max (5000000 vs. 4194304)"),
    ({"InternalError", "OpError"}, TF, "Blas GEMM launch failed"),
    ({"OSError"}, {"builtins"}, "[Errno 28] No space left on device"),
]


@pytest.mark.parametrize("name", WORDS)
def test_each_frameworks_words_are_recognised_with_their_figures(name):
    kinds, roots, text, (place, *sizes) = WORDS[name]
    found = shortage(kinds, roots, text)
    assert found is not None
    assert found.certain
    assert (found.place, found.needed, found.free, found.total) == (
        place,
        *(None if size is None else int(size) for size in sizes),
    )
    assert "Out of memory on" in str(found)


@pytest.mark.parametrize(("kinds", "roots", "text"), OTHERS)
def test_the_word_memory_alone_is_no_shortage(kinds, roots, text):
    assert shortage(kinds, roots, text) is None


def test_a_guess_counts_only_where_memory_is_short():
    words = "could not create a primitive"
    found = shortage(RUNTIME, {"builtins"}, words)
    assert found is not None
    assert not found.certain
    assert recognise(RuntimeError(words)) is None  # there is memory here


def test_an_error_that_was_raised_from_a_shortage_tells_of_it():
    error = RuntimeError("the layer failed")
    error.__cause__ = MemoryError()
    assert recognise(error) is not None
    error = NameError("x")
    error.__context__ = MemoryError()  # handled, and then something else went wrong
    assert recognise(error) is None


def test_the_sentence_tells_gibibytes():
    kinds, roots, text, _ = WORDS["torch.OutOfMemoryError"]
    assert str(shortage(kinds, roots, text)) == (
        "Out of memory on the GPU: 20.0 GiB more were needed, and 0.011 of 14.8 GiB were free."
    )


def test_the_log_of_a_crash_tells(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("step 1\nSegmentation fault\n")
    assert in_log(tmp_path) is None
    assert lost_event(-signal.SIGSEGV, tmp_path, "")["kind"] == "WorkerLost"
    log.write_text("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    event = lost_event(-signal.SIGABRT, tmp_path, "")
    assert event["kind"] == "OutOfMemory"
    assert "SIGABRT" in event["text"]


# ---- the system's memory killer


@pytest.fixture
def system(tmp_path):
    """A machine's files: its counters, its memory, its log."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    group = tmp_path / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\noom 0\noom_kill 1\noom_group_kill 0\n")
    (tmp_path / "dev/kmsg").write_text("")
    return tmp_path


@pytest.fixture
def directory(tmp_path, system):
    """A run's directory with what its worker noted at its begin, and a reading of its meter."""
    path = tmp_path / "run"
    path.mkdir()
    note(path, "memory", **memory_killer.before(system))
    note(path, "meter", memory_free=4 * GIB)
    return path


def note(directory: Path, kind: str, **values) -> None:
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps({"t": time.time(), "event": kind, **values}, separators=(",", ":")) + "\n")


def test_a_kill_that_nothing_tells_of_was_not_the_systems(directory, system):
    event, known = memory_killer.killed(directory, [4711], system)
    assert event is None
    assert "somebody or something else" in known
    assert "4.00 of 16.0 GiB were free" in known


def test_the_containers_counter_tells(directory, system):
    (system / "sys/fs/cgroup/box/memory.events").write_text("oom 1\noom_kill 2\n")
    event, _ = memory_killer.killed(directory, [4711], system)
    assert event["kind"] == "OutOfMemory"
    assert event["certain"]
    assert "has struck here while it trained, so memory ran out" in event["text"]


def test_the_older_containers_counter_tells(directory, system):
    (system / "proc/self/cgroup").write_text("4:memory:/box\n")
    group = system / "sys/fs/cgroup/memory/box"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    note(directory, "memory", **memory_killer.before(system))
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    event, _ = memory_killer.killed(directory, [4711], system)
    assert event["certain"]


def test_the_machines_counter_tells_most_likely(directory, system):
    (system / "proc/vmstat").write_text("oom_kill 4\n")
    event, _ = memory_killer.killed(directory, [4711], system)
    assert not event["certain"]
    assert "most likely" in event["text"]


def test_the_systems_log_tells_for_certain(directory, system):
    now = time.monotonic() * 1e6
    line = f"6,900,{now:.0f},-;Out of memory: Killed process {{}} (python3) total-vm:9kB, anon-rss:5242880kB, file"
    (system / "dev/kmsg").write_text(line.format(4712) + "\n")
    assert memory_killer.killed(directory, [4711], system)[0] is None  # it names another process
    (system / "dev/kmsg").write_text(line.format(4711) + "\n")
    event, _ = memory_killer.killed(directory, [4711], system)
    assert event["certain"]
    assert event["text"].startswith("by the system's memory killer, when it held 5.00 GiB")
    earlier = line.replace(f"{now:.0f}", "1").format(4711)  # of an earlier process with that number
    (system / "dev/kmsg").write_text(earlier + "\n")
    if time.monotonic() > 60:
        assert memory_killer.killed(directory, [4711], system)[0] is None


def test_little_memory_shortly_before_makes_it_likely(directory, system):
    note(directory, "meter", memory_free=200 * MIB)
    event, _ = memory_killer.killed(directory, [4711], system)
    assert not event["certain"]
    assert "0.20 of 16.0 GiB were free" in event["text"]


def test_without_any_counter_it_says_so(directory, system):
    (directory / "events.jsonl").write_text("")
    event, known = memory_killer.killed(directory, [4711], system)
    assert event is None
    assert "If nobody did that, the system ran out of memory" in known


@pytest.fixture
def control_group():
    """A control group with 1 GiB, in whose processes the system's real memory killer chooses."""
    places = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
    limits = ("memory.limit_in_bytes", "memory.max")
    for place, limit in zip(places, limits, strict=True):
        group = place / f"accel_nb-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(GIB))
                (group / "cgroup.procs").read_text()
            except OSError:
                group.rmdir()
                continue
            yield group
            deadline = time.monotonic() + 10
            while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
                time.sleep(0.05)
            group.rmdir()
            return
    pytest.skip("no control group with a memory limit can be made here (it takes root, outside a container)")


def test_a_worker_that_the_real_memory_killer_ends(control_group, runs_folder):
    """The kernel and its worker are in the group; the worker takes memory until it is killed."""
    code = """
        import json
        import accel_nb as anb

        def hungry(input_shape, outputs):
            import torch
            blocks = []
            while True:
                blocks.append(torch.ones(2**23))
            return None

        run = anb.train(framework="pytorch", accelerator="cpu", model=hungry, epochs=1, wait=False)
        try:
            run.wait(120)
        except anb.RunFailed:
            print(json.dumps(run.error))
    """
    script = runs_folder.parent / "kernel.py"
    script.write_text(textwrap.dedent(code))
    command = f"echo $$ > {control_group}/cgroup.procs && exec {sys.executable} {script}"
    told = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=180, check=False)
    error = json.loads(told.stdout.strip().splitlines()[-1])
    assert error["kind"] == "OutOfMemory", error
    assert error["certain"]
    assert "memory killer" in error["text"]
    assert "largest_batch" in error["text"]


# ---- real shortages, under a limit


def big(**fields):
    """A plan whose batch takes memory and little time."""
    shape = {"data": "random", "data_args": {"samples": 8192, "shape": (4, 4, 1)}, "validation": 0}
    model = {"model": "mlp", "model_args": {"layers": [8192], "dropout": 0}, "accelerator": "cpu"}
    return {**shape, **model, "batch_size": 8192, "epochs": 1, "wait": False, **fields}


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_run_that_needs_more_than_its_limit_says_what_was_missing(framework, runs_folder, monkeypatch):
    monkeypatch.setenv(process_memory.VARIABLE, "0.8")
    run = anb.train(framework=framework, **big())
    with pytest.raises(anb.RunFailed, match="Out of memory on this computer") as caught:
        run.wait(180)
    assert run.error["kind"] == "OutOfMemory"
    assert run.error["place"] == "cpu"
    assert "run.largest_batch()" in str(caught.value)
    if framework == "pytorch":
        assert run.error["needed"] == 8192 * 8192 * 4
        assert run.error["total"] == int(0.8 * GIB)
        assert 0 <= run.error["free"] < 1.5 * run.error["needed"]  # in one piece there was less
        assert run.error["where"].startswith("program.py, line ")
        assert "DefaultCPUAllocator" in run.error["traceback"]


def test_a_limit_that_is_no_size_and_one_that_is_too_small(monkeypatch):
    for value in ("four", "-1", "0", "inf", "nan"):
        monkeypatch.setenv(process_memory.VARIABLE, value)
        with pytest.raises(ValueError, match="is no size"):
            process_memory.limit_memory()
    monkeypatch.setenv(process_memory.VARIABLE, "0.001")
    with pytest.raises(MemoryError, match="before it trains"):
        process_memory.limit_memory()


def test_a_limit_holds_in_its_process():
    if not sys.platform.startswith("linux"):
        pytest.skip("the limit is Linux's")
    code = """
        import numpy as np
        from accel_nb import out_of_memory, process_memory
        process_memory.limit_memory()
        try:
            np.ones(2**27)
        except MemoryError as error:
            print(out_of_memory.recognise(error))
        odd = ValueError("I/O operation on closed file")
        assert out_of_memory.recognise(odd) is None
        blocks = []
        try:
            while True:
                blocks.append(np.ones(2**17))
        except MemoryError:
            assert "Most likely" in str(out_of_memory.recognise(odd))
            assert out_of_memory.recognise(TypeError("a slip of the pen")) is None
        del blocks
        free, total = process_memory.room()
        assert total == 2**29 and 0 < free < total, (free, total)
        assert process_memory.peak("cpu") > 0
    """
    env = {**os.environ, process_memory.VARIABLE: "0.5"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("Out of memory on this computer: 1.00 GiB more were needed, and 0.")
    assert told.stdout.strip().endswith("of 0.50 GiB were free.")


@pytest.mark.hardware
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_gpu_that_runs_out_says_so(framework, runs_folder):
    if not machine.machine().gpus:
        pytest.skip("no NVIDIA GPU is here")
    wide = {"layers": [65536], "dropout": 0}
    free = machine.machine().gpus[0].memory_free
    rows = free // (65536 * 4)  # one layer's outputs take all of it
    data = {"samples": int(rows), "shape": (4, 4, 1)}
    run = anb.train(
        framework=framework, **big(accelerator="gpu", model_args=wide, data_args=data, batch_size=int(rows))
    )
    with pytest.raises(anb.RunFailed):
        run.wait(300)
    assert run.error["kind"] == "OutOfMemory"
    assert run.error["place"] == "gpu"


def test_random_data_for_nothing(tmp_path):
    """Rows of zeros behind those that a trial reads take no room on this disk, and are rows to NumPy."""
    from accel_nb.trials import write_rows

    write_rows(tmp_path / "x.npy", np.ones((3, 2), np.float32), more=10**6)
    array = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert array.shape == (3 + 10**6, 2)
    assert array[:3].sum() == 6
    assert array[3:].sum() == 0
