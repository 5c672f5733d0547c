"""Histories for the tests of history, lines and curves."""

from __future__ import annotations

import numpy as np

from accel_nb.history import History


def made(loss, accuracy=None, *, per_epoch=None, validation=True, block=7):
    """A history with these batch values, in blocks of `block` steps; validation loss is the epoch's mean + 0.1."""
    loss = np.asarray(loss, dtype=float)
    history = History()
    per_epoch = per_epoch or max(1, len(loss))
    history.add({"event": "started", "steps_per_epoch": per_epoch, "learning_rate": 0.001})
    for begin in range(0, len(loss), per_epoch):
        end, epoch = min(begin + per_epoch, len(loss)), begin // per_epoch + 1
        for first in range(begin, end, block):
            event = {"event": "batch", "epoch": epoch, "first": first + 1}
            event["loss"] = loss[first : min(first + block, end)].tolist()
            if accuracy is not None:
                event["accuracy"] = np.asarray(accuracy)[first : min(first + block, end)].tolist()
            history.add(event)
        if end - begin == per_epoch:
            with np.errstate(all="ignore"):
                event = {"event": "epoch", "epoch": epoch, "step": end, "seconds": 0.5}
                event["loss"] = float(loss[begin:end].mean())
                if validation:
                    event["val_loss"] = event["loss"] + 0.1
                    if accuracy is not None:
                        event["val_accuracy"] = float(np.asarray(accuracy)[begin:end].mean())
            history.add(event)
    return history


def falling(steps, *, seed=0, per_epoch=None, accuracy=True, block=None, **more):
    """A noisy run as they usually are: the loss falls from 2.3, the accuracy climbs."""
    random = np.random.default_rng(seed)
    along = np.arange(steps) / max(steps, 1)
    loss = (0.1 + 2.2 * np.exp(-6 * along)) * np.exp(0.1 * random.standard_normal(steps))
    rate = np.clip(1 - 0.9 * np.exp(-6 * along) + 0.03 * random.standard_normal(steps), 0, 1)
    per_epoch = per_epoch or max(1, steps // 10)
    block = block or max(7, steps // 2000)
    return made(loss, rate if accuracy else None, per_epoch=per_epoch, block=block, **more)
