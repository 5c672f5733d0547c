"""Starts a command once per device, under the agent of torchrun; used by a run's worker, no part of a program."""

from __future__ import annotations

import uuid

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(command: list[str], devices: int) -> dict[int, int]:
    """Wait for the end of all: {} if it was good, else the exit code (below 0: a signal) of the first to fail.

    The ranks meet at a free port of the loopback interface; the first failure ends the others within a second.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # the host's own name may lead nowhere
        max_restarts=0,  # a run goes on from its checkpoint, not by starting ranks anew
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}
