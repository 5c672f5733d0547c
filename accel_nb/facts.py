"""What a plan needs to know of its data: shape and counts, without loading a named set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_nb.plan import Plan


@dataclass(frozen=True)
class Facts:
    """What a plan needs to know of its data: of one sample the shape, and counts."""

    name: str
    label: str
    input_shape: tuple[int, ...]
    outputs: int
    task: str
    scale: float
    train_samples: int
    val_samples: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "input_shape": list(self.input_shape)}

    @classmethod
    def of(cls, dataset: Any) -> Facts:
        """The facts of a loaded Dataset."""
        return cls(
            dataset.name,
            dataset.label,
            tuple(dataset.input_shape),
            dataset.outputs,
            dataset.task,
            dataset.scale,
            dataset.train_samples,
            dataset.val_samples,
            dataset.nbytes,
        )


_last_dataset: list[tuple[tuple[Any, ...], Any]] = []


def dataset_of(plan: Plan) -> Any:
    """The plan's Dataset; the one loaded last is kept, as Train is pressed again and again on the same data."""
    from accel_nb.data import load

    key = (id(plan.data), str(plan.data) if isinstance(plan.data, str) else "", repr(plan.data_args))
    key = (*key, plan.validation, plan.seed)
    if isinstance(plan.data, str) and not plan.data.endswith(".npz"):
        key = (0, *key[1:])
        for known, dataset in _last_dataset:
            if known == key:
                return dataset
    dataset = load(plan.data, data_args=plan.data_args, validation=plan.validation, seed=plan.seed)
    _last_dataset[:] = [(key, dataset)] if key[0] == 0 else []
    return dataset


def facts_of(plan: Plan) -> tuple[Facts, Any]:
    """Facts on a plan's data, and the Dataset where it had to be read for them; named sets are told without that."""
    from accel_nb import data

    if isinstance(plan.data, str) and plan.data in data.NAMED:
        told = data.describe(plan.data, data_args=plan.data_args, validation=plan.validation)
        return (
            Facts(
                plan.data,
                told.label,
                tuple(told.input_shape),
                told.classes,
                "classification",
                told.scale,
                told.train_samples,
                told.val_samples,
                told.nbytes,
            ),
            None,
        )
    dataset = dataset_of(plan)
    return Facts.of(dataset), dataset
