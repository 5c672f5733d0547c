"""The named data sets: one that is built in, three that are downloaded once, and random data for speed work."""

from __future__ import annotations

import gzip
import importlib.util
import io
import math
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel_nb.download import DownloadError, Progress, Remote, cache_folder, fetch, is_cached
from accel_nb.errors import DataError

_TEN = tuple(str(digit) for digit in range(10))


@dataclass(frozen=True)
class Source:
    """A data set of this module as it is known without loading it."""

    label: str
    samples: int  # all of them
    own_validation: int  # how many of these are the set's own test part
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    scale: float
    files: tuple[Remote, ...] = ()  # in the order train images, train labels, test images, test labels
    addresses: tuple[str, ...] = ()

    @property
    def download_bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Loaded:
    """x (samples, height, width, channels) or (samples, features), y (samples,) int64; the test part or None."""

    x: np.ndarray
    y: np.ndarray
    x_val: np.ndarray | None = None
    y_val: np.ndarray | None = None


def _idx_files(*sums: tuple[str, int]) -> tuple[Remote, ...]:
    """The four files of MNIST and of the sets made in its image, with (SHA-256, bytes) each."""
    return tuple(
        Remote(f"{part}-ubyte.gz", *known)
        for part, known in zip(
            ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"), sums, strict=True
        )
    )


SOURCES: dict[str, Source] = {
    "digits": Source("digits · 1,797 real 8×8 scans, built in", 1797, 0, (28, 28, 1), _TEN, 16.0),
    "mnist": Source(
        "mnist · 70,000 real 28×28 digits, 12 MB to download once",
        70_000,
        10_000,
        (28, 28, 1),
        _TEN,
        255.0,
        _idx_files(
            ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
            ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
            ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
            ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
        ),
        (
            "https://storage.googleapis.com/cvdf-datasets/mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist",
        ),
    ),
    "fashion_mnist": Source(
        "fashion_mnist · 70,000 real 28×28 pictures of clothes, 31 MB to download once",
        70_000,
        10_000,
        (28, 28, 1),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        255.0,
        _idx_files(
            ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
            ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
            ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
            ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
        ),
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
        ),
    ),
    "cifar10": Source(
        "cifar10 · 60,000 real 32×32 colour pictures, 170 MB to download once",
        60_000,
        10_000,
        (32, 32, 3),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        255.0,
        (
            # the binary version: the other one is a pickle, which runs code when it is read
            Remote(
                "cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170_052_171,
            ),
        ),
        ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz"),
    ),
}


def load_named(name: str, progress: Progress | None = None) -> Loaded:
    """A set of SOURCES. Raises DataError where it cannot be had, naming the built-in choice."""
    if name == "digits":
        return Loaded(*_digits())
    source = SOURCES[name]
    folder = cache_folder() / name
    instead = 'data="digits" (built in, 1,797 real scans) needs no network.'
    try:
        contents = fetch(source.files, source.addresses, folder, progress)
    except DownloadError as error:
        why = f"It could not be downloaded ({error})."
        do = f"Connect to the network and try again, or put the files into {folder} by hand."
        raise DataError("data", name, why, do, instead) from error
    except OSError as error:
        why = f"The download cannot be kept in {folder} ({error.strerror or error})."
        raise DataError("data", name, why, "Set ACCEL_NB_CACHE to a folder with room.", instead) from error
    parts = [contents[file.name] for file in source.files]
    if name == "cifar10":
        return cifar_arrays(parts[0])
    x, y, x_val, y_val = (idx_array(part) for part in parts)
    return Loaded(x[..., None], y.astype(np.int64), x_val[..., None], y_val.astype(np.int64))


def is_here(name: str) -> bool:
    """True where `load_named` needs no network."""
    source = SOURCES[name]
    return not source.files or is_cached(source.files, cache_folder() / name)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's scans as x (1797, 28, 28, 1) uint8 from 0 to 16, and y.

    Each of the 8×8 pixels grows to 3×3, and a margin of 2 makes 28×28 of it: the size of MNIST.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        why = "The digits come with scikit-learn, which is not installed."
        raise DataError("data", "digits", why, "Install it with: pip install scikit-learn")
    # The table itself is read where it lies: importing sklearn.datasets for it takes more than a second.
    table = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if table.exists():
        text = gzip.decompress(table.read_bytes()).decode("ascii")
        rows = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.uint8)
        pixels, y = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        pixels, y = load_digits(return_X_y=True)
    small = np.asarray(pixels, np.uint8).reshape(-1, 8, 8)
    grown = small.repeat(3, axis=1).repeat(3, axis=2)
    return np.pad(grown, ((0, 0), (2, 2), (2, 2)))[..., None], np.asarray(y, np.int64)


def idx_array(content: bytes) -> np.ndarray:
    """The array of a gzipped IDX file of bytes: 0, 0, type 8, the number of dimensions, each as 4 bytes."""
    data = gzip.decompress(content)
    if data[:3] != b"\0\0\x08":
        raise ValueError("This is no IDX file of unsigned bytes.")
    shape = np.frombuffer(data, ">u4", data[3], 4).tolist()
    return np.frombuffer(data, np.uint8, math.prod(shape), 4 + 4 * data[3]).reshape(shape)


def cifar_arrays(archive: bytes) -> Loaded:
    """The pictures of the binary version of CIFAR-10: records of a label and 3×32×32 bytes, channels first."""
    parts = []
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        found = {member.name: member for member in tar if member.isfile()}
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            file = tar.extractfile(found[f"cifar-10-batches-bin/{name}.bin"])
            assert file is not None  # it is a regular file
            parts.append(np.frombuffer(file.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32))

    def images(records: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))

    train, test = np.concatenate(parts[:5]), parts[5]
    return Loaded(images(train), train[:, 0].astype(np.int64), images(test), test[:, 0].astype(np.int64))


RANDOM = {"samples": 10_000, "shape": (28, 28, 1), "classes": 10}


def random_settings(data_args: dict[str, Any]) -> tuple[int, tuple[int, ...], int]:
    """`samples`, `shape` and `classes` for the random data, checked."""
    wanted = {**RANDOM, **data_args}
    samples, shape, classes = wanted["samples"], wanted["shape"], wanted["classes"]

    def count(value: Any, least: int) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)

    if not count(samples, 1):
        raise DataError("samples", samples, "It must be a whole number from 1 on.", "Pass for example 10000.")
    if count(shape, 1):
        shape = (shape,)
    if (
        not isinstance(shape, tuple | list)
        or len(shape) not in {1, 3}
        or not all(count(size, 1) for size in shape)
    ):
        why = "It must be (features,) or (height, width, channels), each from 1 on."
        raise DataError("shape", shape, why, "Pass for example (28, 28, 1).")
    if not count(classes, 2):
        raise DataError("classes", classes, "It must be a whole number from 2 on.", "Pass for example 10.")
    if classes > samples:
        why = f"There are only {samples:,} samples, fewer than classes."
        raise DataError("classes", classes, why, "Ask for more samples or fewer classes.")
    shape = tuple(int(size) for size in shape)
    needed = (int(samples) + int(classes)) * math.prod(shape) + 24 * int(samples)  # x, the patterns, labels
    import psutil

    free = psutil.virtual_memory().available
    if needed > free // 2:
        why = f"So many samples of shape {shape} take {needed / 2**30:,.1f} GiB."
        here = f"{free / 2**30:,.1f} GiB of memory are free."
        raise DataError("samples", samples, why, "Ask for fewer or smaller samples.", here)
    return int(samples), shape, int(classes)


def random_data(samples: int, shape: tuple[int, ...], classes: int, seed: int) -> Loaded:
    """A pattern per class (0 to 63) under strong noise (0 to 191), so that a loss can fall.

    x is uint8 (samples, *shape). Every class has at least one sample; the same seed gives the same data.
    """
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(samples, dtype=np.int64) % classes)
    pattern = rng.integers(0, 64, (classes, *shape), np.uint8)
    x = rng.integers(0, 192, (samples, *shape), np.uint8)
    step = max(1, (8 << 20) // math.prod(shape))
    for start in range(0, samples, step):  # in pieces, or the patterns would take the memory of x once more
        x[start : start + step] += pattern[y[start : start + step]]
    return Loaded(x, y)
