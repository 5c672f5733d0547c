"""How a run is spread over devices: the strategy, and what its replicas and workers agree on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from settings import ACCELERATOR, DEVICES, MODEL, NODES, STRATEGY


@cache  # a second one in this process would take the collectives of the first one for its own
def make_strategy() -> tf.distribute.Strategy:
    """The strategy over this run's devices; no other devices stay visible."""
    if ACCELERATOR == "cpu" and STRATEGY in ("mirrored", "tpu") and DEVICES > 1:
        # One processor plays several devices: what they compute is the same, only not faster.
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    if ACCELERATOR == "gpu":
        gpus = tf.config.list_physical_devices("GPU")
        if STRATEGY == "mirrored":
            wanted = list(range(DEVICES))
        if STRATEGY == "multi_worker":
            wanted = [place_on_machine()]  # each worker has one GPU for itself
        if len(gpus) <= max(wanted):
            raise RuntimeError(
                f"GPU {max(wanted)} was asked for, and TensorFlow {tf.__version__} sees {len(gpus)} GPUs here. "
                "Nothing was trained."
            )
        tf.config.set_visible_devices([gpus[i] for i in wanted], "GPU")
    if STRATEGY == "mirrored":
        strategy = tf.distribute.MirroredStrategy([f"/{ACCELERATOR}:{i}" for i in range(DEVICES)])
    elif STRATEGY == "multi_worker":
        strategy = join_workers()
    elif STRATEGY == "tpu" and ACCELERATOR == "tpu":
        strategy = tpu_strategy()
    elif STRATEGY == "tpu" and DEVICES == 1:
        strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    elif STRATEGY == "tpu":
        strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(DEVICES)])
    return strategy


def tpu_strategy() -> tf.distribute.Strategy:
    """The strategy over the TPU of this machine, or an error in words; TensorFlow works on the CPU afterwards."""
    names = [str(package.name).replace("_", "-") for package in metadata.distributions()]  # both spellings are met
    if "tensorflow-tpu" in names:
        # These two would not end in an error that can be caught, but in minutes of waiting and in an abort.
        vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
        if not any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors):
            raise RuntimeError(
                "No TPU chip is on this machine's PCI bus: pick a TPU as hardware, then start anew."
            )
        library = Path(str(find_spec("libtpu").origin)).with_name("libtpu.so")
        with library.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            if content.find(b"ConfigureDistributedTpuOp_DoWork") < 0:
                raise RuntimeError(
                    f"libtpu {metadata.version('libtpu')} no longer has what TensorFlow {tf.__version__} calls: "
                    "pip install libtpu==0.0.21.1, then start anew."
                )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except tf.errors.OpError as error:
        if "OpKernel" in str(error):
            raise RuntimeError(
                f"This TensorFlow {tf.__version__} is built without TPUs: "
                "pip install tensorflow-tpu in place of tensorflow, then start anew."
            ) from error
        raise RuntimeError(
            "TensorFlow cannot use the TPU. Most often another process holds it: "
            f"end that one (sudo lsof /dev/accel* /dev/vfio/* names it), then start anew. It said: {error.message}"
        ) from error
    strategy = tf.distribute.TPUStrategy(resolver)
    if strategy.num_replicas_in_sync != DEVICES:
        raise RuntimeError(
            f"The TPU here has {strategy.num_replicas_in_sync} devices: set DEVICES to that number."
        )
    return strategy


def cluster() -> tuple[list[str], int]:
    """The addresses of all workers, and which of them this process is."""
    if "TF_CONFIG" not in os.environ:
        raise RuntimeError(
            f"This program is for {DEVICES * NODES} workers that train together: start it once for each, with "
            'TF_CONFIG=\'{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": I}}\' '
            "in its environment; I counts from 0, and the list is the same for all."
        )
    config = json.loads(os.environ["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    if len(workers) != DEVICES * NODES:
        raise RuntimeError(f"TF_CONFIG names {len(workers)} workers; this program is for {DEVICES * NODES}.")
    return workers, config["task"]["index"]


def place_on_machine() -> int:
    """How many workers before this one are on its machine."""
    workers, index = cluster()
    hosts = [worker.rpartition(":")[0] for worker in workers]
    return hosts[:index].count(hosts[index])


def join_workers() -> tf.distribute.Strategy:
    """The strategy over all workers, once all are there."""
    workers, index = cluster()
    if NODES == 1:
        patience = 12  # seconds
    if NODES > 1:
        patience = 600  # seconds: somebody starts them by hand
    # TensorFlow would wait for an hour for one that is missing, and could not be interrupted.
    if index == 0:
        gather_workers(workers, patience)
    else:
        come_to_first_worker(workers[0], index, patience)
    return tf.distribute.MultiWorkerMirroredStrategy()


def gather_workers(workers: list[str], patience: float) -> None:
    """The first worker's part: wait until all others have come, then let them go on together."""
    deadline = time.monotonic() + patience
    came: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("", int(workers[0].rpartition(":")[2]))))
        while len(came) < len(workers) - 1:
            door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = stack.enter_context(door.accept()[0])
            except TimeoutError as error:
                missing = [f"{i} ({worker})" for i, worker in enumerate(workers) if i > 0 and i not in came]
                raise TimeoutError(f"Missing after {patience} s: worker {', '.join(missing)}.") from error
            connection.settimeout(1)
            with contextlib.suppress(OSError, ValueError):  # somebody else may knock
                came[int(connection.recv(8))] = connection
        for connection in came.values():
            connection.sendall(b"go")


def come_to_first_worker(address: str, index: int, patience: float) -> None:
    """The other workers' part."""
    deadline = time.monotonic() + patience
    host, _, port = address.rpartition(":")
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=1) as connection:
                connection.sendall(str(index).encode())
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                if connection.recv(8) == b"go":
                    return
        except OSError:  # it does not listen yet
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"Worker 0 ({address}) and the others were not all there after {patience} s.")
        time.sleep(0.05)


def unheard(event: str, **values: Any) -> None:
    """The report of a worker that is not the first one."""


@tf.function(autograph=False, reduce_retracing=True)
def over_workers(strategy: tf.distribute.Strategy, values: tf.Tensor) -> tf.Tensor:
    """The sum of all workers' values, on each of them; waits for the last one, as long as it takes."""

    def summed(own: tf.Tensor) -> tf.Tensor:
        # By way of the hosts, where waiting costs nothing: with NCCL a GPU would be kept busy.
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(own), options)

    return strategy.experimental_local_results(strategy.run(summed, args=(values,)))[0]


def from_first(
    strategy: tf.distribute.Strategy, asked: dict[str, Any], rate: float, length: int
) -> tuple[dict[str, Any], int]:
    """What the first worker was asked to do, and the number of steps that it takes next: on every worker."""
    told = [asked.get("stop", False), asked.get("learning_rate", rate), length]
    if strategy.cluster_resolver.task_id > 0:
        told = [0.0, 0.0, 0.0]
    stop, rate, length = over_workers(strategy, tf.constant(told, tf.float64)).numpy().tolist()
    return {"stop": stop > 0, "learning_rate": rate}, int(length)


def prepare_replicas(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Let each replica draw random numbers of its own, and batch normalisation see the rows of all of them."""

    def shift() -> None:  # the first replica draws what a single device draws
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        for variable in model.variables:
            if "seed_generator_state" in variable.path:
                variable.assign_add([replica, 0])

    tf.function(lambda: strategy.run(shift), autograph=False)()
    if MODEL == "own" and STRATEGY != "multi_worker":
        check_losses(model)
    if MODEL != "mlp":
        synchronize(model, over_replicas=True)


def check_losses(model: keras.Model) -> None:
    """Refuse a model whose replicas would take each other's losses.

    They are traced in turns, which change at each batch normalisation, and Keras keeps a loss that comes from
    activations at the layer, where the next replica overwrites it.
    """
    from_weights = [weight for weight in model.trainable_variables if weight.regularizer is not None]
    layers = model._flatten_layers()  # noqa: SLF001 - nothing public also finds the layers inside layers
    if len(model.losses) > len(from_weights) and any(map(normalises, layers)):
        raise ValueError(
            "The model has losses of its activations (activity_regularizer or add_loss) and batch normalisation: "
            f"under the strategy {STRATEGY!r} the replicas would mix them up. Take one of both out, "
            "or another strategy: multi_worker or single."
        )


def normalises(layer: keras.layers.Layer) -> bool:
    """Whether it works with the statistics of the batch."""
    return isinstance(layer, keras.layers.BatchNormalization)


def synchronize(model: keras.Model, over_replicas: bool) -> None:
    """Let batch normalisation see the rows of all replicas, or those of one as on a single device."""
    for layer in model._flatten_layers():  # noqa: SLF001 - nothing public also finds the layers inside layers
        if normalises(layer):
            layer.synchronized = over_replicas
