"""A run on several machines: the line that starts it on each of them."""

from __future__ import annotations

import json
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_nb.errors import PlanError


def commands(
    directory: Path, plan: Mapping[str, Any], addresses: Sequence[str] = (), port: int = 29500
) -> list[str]:
    """One shell line per machine, the first machine's first; each starts this run's program there.

    Parameters
    ----------
    directory : the run's directory, which all machines see under the same path (shared storage).
    plan : the resolved plan: framework, nodes, devices (of each machine), accelerator.
    addresses : host names or IP addresses under which the machines reach each other, the first machine's first.
        PyTorch needs the first one only. Default for the first: this machine's address; for the others a
        placeholder to fill in.
    port : a free TCP port, 1 to 65535, on the first machine; TensorFlow's workers take it and the ones above it.
    """
    nodes, devices = int(plan["nodes"]), int(plan["devices"])
    hosts = [_checked(address.strip()) for address in addresses if address.strip()][:nodes]
    if not hosts:
        hosts = [own_address()]
    hosts += [f"ADDRESS-OF-MACHINE-{number}" for number in range(len(hosts) + 1, nodes + 1)]
    program = shlex.quote(str(directory / "program.py"))
    if nodes == 1 and plan["framework"] == "pytorch":
        return [f"torchrun --standalone --nproc-per-node={devices} {program}"]
    if plan["framework"] == "pytorch":
        return [
            f"torchrun --nnodes={nodes} --node-rank={rank} --nproc-per-node={devices}"
            f" --master-addr={hosts[0]} --master-port={port} {program}"
            for rank in range(nodes)
        ]
    workers = [_joined(host, port + number) for host in hosts for number in range(devices)]
    lines = []
    for node in range(nodes):
        parts = []
        for number in range(devices):
            task = {"type": "worker", "index": node * devices + number}
            config = shlex.quote(json.dumps({"cluster": {"worker": workers}, "task": task}))
            parts.append(f"TF_CONFIG={config} python {program}")
        lines.append(" & ".join(parts))
    return lines


def _checked(address: str) -> str:
    """A host name or IP address; anything else has no place in a shell line."""
    if not re.fullmatch(r"[0-9A-Za-z._:-]+", address):
        why = "It is no host name and no IP address."
        raise PlanError("addresses", address, why, "Pass names such as node1 or 10.0.0.1.")
    return address


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address() -> str:
    """The address under which other machines reach this one: that of its way out, or its host name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(
                ("192.0.2.1", 9)
            )  # reserved for examples (RFC 5737); a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
