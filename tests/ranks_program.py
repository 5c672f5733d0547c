"""A program of two ranks that add up a number at each step, with a fault in rank 1 that a test asks for."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def train(report, control, save_to):
    fault, rank = os.environ.get("RANKS_FAULT", ""), int(os.environ["RANK"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if fault == "absent" and rank == 1:
        time.sleep(1000)
    report("joining")
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    group = dist.new_group(timeout=timedelta(days=30))
    report("joined")
    if rank == 0:
        report("model", parameters=1, layers=[])
        facts = {"device": "cpu", "device_name": "", "versions": {}, "val_samples": 0, "learning_rate": 0.1}
        report("started", steps_per_epoch=3000, train_samples=10, **facts)
    for step in range(1, 3001):
        word = torch.zeros(1)
        if rank == 0:
            word[0] = bool(control().get("stop"))
        dist.broadcast(word, 0, group=group)
        if word[0]:
            return
        if step == 20 and rank == 1 and fault == "raise":
            raise ValueError("rank 1 met a bad batch")
        if step == 20 and rank == 1 and fault == "hang":
            time.sleep(1000)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        time.sleep(0.01)
        if rank == 0:
            report("batch", epoch=1, first=step, loss=[float(total)], accuracy=[0.5], learning_rate=0.1)
