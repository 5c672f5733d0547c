"""What a plan needs to know of its data: shape and counts, without loading a named set."""

from __future__ import annotations

from collections.abc import Mapping
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

    def summary(self) -> str:
        """Counts in words, such as "1,437 train · 360 validation · 10 classes"."""
        kinds = f"{self.outputs:,} {'classes' if self.task == 'classification' else 'targets'}"
        val = f"{self.val_samples:,} validation" if self.val_samples else "no validation"
        return f"{self.train_samples:,} train · {val} · {kinds}"

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "input_shape": list(self.input_shape)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Facts:
        """The facts that `to_dict` told."""
        return cls(**{**told, "input_shape": tuple(told["input_shape"])})

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


_last: list[tuple[tuple[Any, ...], Any]] = []


def is_named(data: Any) -> bool:
    """Whether a plan's data is a name; else it is a file or arrays."""
    return isinstance(data, str) and not data.lower().endswith((".npz", ".npy"))


def dataset_of(plan: Plan) -> Any:
    """The plan's Dataset. The named set loaded last is kept: Train is pressed again and again on the same data."""
    from accel_nb.data import load

    named = is_named(plan.data)
    key = (plan.data, repr(plan.data_args), plan.validation, plan.seed) if named else ()
    for known, dataset in _last:
        if named and known == key:
            return dataset
    dataset = load(plan.data, data_args=plan.data_args, validation=plan.validation, seed=plan.seed)
    if named:
        _last[:] = [(key, dataset)]
    return dataset


def facts_of(plan: Plan) -> tuple[Facts, Any]:
    """Facts on a plan's data, and the Dataset where it had to be loaded; named sets are told without.

    DataError for data that cannot be used, or an unknown name.
    """
    from accel_nb.data import describe

    if not is_named(plan.data):
        dataset = dataset_of(plan)
        return Facts.of(dataset), dataset
    told = describe(plan.data, data_args=plan.data_args, validation=plan.validation)
    facts = Facts(
        name=plan.data,
        label=told.label,
        input_shape=tuple(told.input_shape),
        outputs=told.classes,
        task="classification",
        scale=told.scale,
        train_samples=told.train_samples,
        val_samples=told.val_samples,
        nbytes=told.nbytes,
    )
    return facts, None
