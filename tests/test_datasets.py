"""The named data sets; the downloads against a real server on this computer that can misbehave."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import struct
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from accel_nb import datasets, download
from accel_nb.data import NAMED, describe, load
from accel_nb.download import Remote
from accel_nb.errors import DataError

RNG = np.random.default_rng(0)


def idx(array) -> bytes:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


PARTS = {
    "x": RNG.integers(0, 256, (50, 28, 28), np.uint8),
    "y": (np.arange(50) % 10).astype(np.uint8),
    "x_val": RNG.integers(0, 256, (20, 28, 28), np.uint8),
    "y_val": (np.arange(20) % 10).astype(np.uint8),
}
FILES = {f"{name}.gz": idx(array) for name, array in PARTS.items()}


class Server(ThreadingHTTPServer):
    """Serves FILES below /good, and below other names the ways in which servers fail."""

    def __init__(self):
        self.asked: list[str] = []
        self.over = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    def address(self, manner: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{manner}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.asked.append(self.path)
        _, manner, name = self.path.split("/")
        content = FILES.get(name)
        if manner == "silent":
            self.server.over.wait()
        elif manner == "missing" or content is None:
            self.send_error(404)
        else:
            if manner == "other":
                content = content[:-1] + bytes([content[-1] ^ 1])
            if manner == "longer":
                content += b"x"
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if manner in {"short", "trickle"}:
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                if manner == "trickle":
                    self.server.over.wait()
            else:
                self.wfile.write(content)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.over.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ACCEL_NB_CACHE", str(folder))
    return folder


@pytest.fixture
def served(monkeypatch, server, cache):
    """Give mnist the small files of this module, at addresses with the given manners."""
    monkeypatch.setattr(download, "SILENCE", 3.0)

    def set_up(*manners):
        files = tuple(Remote(name, hashlib.sha256(data).hexdigest(), len(data)) for name, data in FILES.items())
        addresses = tuple(server.address(manner) for manner in manners)
        monkeypatch.setitem(
            datasets.SOURCES, "mnist", replace(datasets.SOURCES["mnist"], files=files, addresses=addresses)
        )

    return set_up


def test_a_download_is_read_with_its_own_test_part_as_validation(served):
    served("good")
    lines = []
    dataset = load("mnist", progress=lines.append)
    assert dataset.summary() == "50 train · 20 validation · 10 classes"
    np.testing.assert_array_equal(dataset.x_train[..., 0], PARTS["x"])
    np.testing.assert_array_equal(dataset.y_train, PARTS["y"])
    np.testing.assert_array_equal(dataset.x_val[..., 0], PARTS["x_val"])
    np.testing.assert_array_equal(dataset.y_val, PARTS["y_val"])
    assert (dataset.scale, dataset.y_train.dtype, dataset.input_shape) == (255.0, np.int64, (28, 28, 1))
    assert load("mnist", validation=0).summary() == "50 train · no validation · 10 classes"


def test_the_cache_needs_no_network(served, server, cache):
    served("good")
    assert not describe("mnist").available
    assert "downloaded on first use" in describe("mnist").why
    first = load("mnist")
    assert describe("mnist").available
    assert describe("mnist").why == ""
    asked = len(server.asked)
    server.shutdown()
    np.testing.assert_array_equal(load("mnist").x_train, first.x_train)
    assert len(server.asked) == asked == 4
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(FILES)  # and nothing half written


def test_a_damaged_cache_is_fetched_again(served, server, cache):
    served("good")
    load("mnist")
    path = cache / "mnist" / "x.gz"
    path.write_bytes(b"damaged")
    load("mnist")
    assert server.asked.count("/good/x.gz") == 2
    assert path.read_bytes() == FILES["x.gz"]


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("missing", "the server says 404"),
        ("other", "wrong checksum"),
        ("longer", "wrong checksum"),
        ("short", "bytes came"),
        ("silent", "no answer, or too slow a one"),
        ("trickle", "no answer, or too slow a one"),
    ],
)
def test_a_server_that_fails_is_one_sentence_that_names_the_built_in_choice(served, cache, manner, words):
    served(manner)
    with pytest.raises(DataError) as caught:
        load("mnist")
    assert words in caught.value.why
    assert 'data="digits"' in caught.value.here
    assert str(cache / "mnist") in caught.value.do
    assert list((cache / "mnist").iterdir()) == []


def test_no_network_at_all(served, server, monkeypatch):
    served("good")
    port = server.server_port
    source = datasets.SOURCES["mnist"]
    # Port 1 refuses; a name that ends in .invalid never resolves.
    addresses = ("http://127.0.0.1:1/x", f"http://accel-nb.invalid:{port}/x")
    monkeypatch.setitem(datasets.SOURCES, "mnist", replace(source, addresses=addresses))
    with pytest.raises(DataError) as caught:
        load("mnist")
    assert "127.0.0.1: " in caught.value.why
    assert "accel-nb.invalid: " in caught.value.why


def test_all_addresses_together_stay_under_ten_seconds():
    assert download.SILENCE <= 8


@pytest.mark.parametrize("first", ["missing", "other", "short", "silent"])
def test_the_next_address_helps_and_is_asked_first_from_then_on(served, server, first):
    served(first, "good")
    assert load("mnist").train_samples == 50
    assert [path.split("/")[1] for path in server.asked] == [first, "good", "good", "good", "good"]


def test_a_cache_that_cannot_be_written_is_said(served, cache, monkeypatch):
    served("good")
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="Set ACCEL_NB_CACHE to a folder with room"):
        load("mnist")


def test_what_a_killed_process_left_is_swept_away(served, cache):
    served("good")
    folder = cache / "mnist"
    folder.mkdir(parents=True)
    old, new = folder / ".x.gz.1.part", folder / ".x.gz.2.part"
    for path in (old, new):
        path.touch()
    import os

    os.utime(old, (0, 0))
    load("mnist")
    assert not old.exists()
    assert new.exists()  # another process may be writing it


def test_where_downloads_are_kept(monkeypatch):
    monkeypatch.setenv("ACCEL_NB_CACHE", "~/own")
    assert download.cache_folder() == Path.home() / "own"
    monkeypatch.delenv("ACCEL_NB_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    assert download.cache_folder() == Path("xdg/accel_nb")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert download.cache_folder() == Path.home() / "Library/Caches/accel_nb"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "local")
    assert download.cache_folder() == Path("local/accel_nb/cache")


def test_the_table_of_sources():
    for name, source in datasets.SOURCES.items():
        assert source.label.startswith(f"{name} · ")
        assert bool(source.files) == bool(source.addresses) == (name != "digits")
        assert all(address.startswith("https://") for address in source.addresses)
        assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) for file in source.files)
        assert len(set(source.class_names)) == len(source.class_names) == 10


def test_an_idx_file_of_another_type_is_refused():
    with pytest.raises(ValueError, match="no IDX file of unsigned bytes"):
        datasets.idx_array(gzip.compress(b"\0\0\x0d\1\0\0\0\1\0\0\0\0"))


def test_the_binary_version_of_cifar_is_read_without_running_anything():
    records = {f"data_batch_{number}": RNG.integers(0, 10, (4, 3073), np.uint8) for number in range(1, 6)}
    records["test_batch"] = RNG.integers(0, 10, (3, 3073), np.uint8)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, array in records.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = array.nbytes
            tar.addfile(info, io.BytesIO(array.tobytes()))
    loaded = datasets.cifar_arrays(buffer.getvalue())
    assert (loaded.x.shape, loaded.x_val.shape) == ((20, 32, 32, 3), (3, 32, 32, 3))
    third = records["data_batch_2"][2]
    assert loaded.y[6] == third[0]
    # channels first in the file: byte 1 + 1024 * channel + 32 * row + column
    assert loaded.x[6, 5, 9, 2] == third[1 + 2 * 1024 + 5 * 32 + 9]


def test_the_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    truth = load_digits()
    dataset = load("digits", validation=0)
    small = dataset.x_train[:, 3:27:3, 3:27:3, 0]  # the middle of each 3×3 block
    np.testing.assert_array_equal(small, truth.images)
    np.testing.assert_array_equal(dataset.y_train, truth.target)
    assert (dataset.x_train.shape, dataset.x_train.dtype, dataset.scale) == ((1797, 28, 28, 1), np.uint8, 16.0)
    margin = dataset.x_train.copy()
    margin[:, 2:26, 2:26] = 0
    assert not margin.any()


def test_loading_the_digits_imports_no_framework_and_no_scikit_learn():
    code = "import sys; from accel_nb.data import load; load('digits'); print(sorted(sys.modules))"
    seen = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for name in ("torch", "tensorflow", "keras", "jax", "sklearn", "scipy", "pandas", "matplotlib", "IPython"):
        assert f"'{name}'" not in seen


def test_random_data_can_be_told_apart_and_repeat_by_seed():
    dataset = load("random", data_args={"samples": 300, "shape": (8, 8, 3), "classes": 3})
    assert dataset.summary() == "240 train · 60 validation · 3 classes"
    assert (dataset.input_shape, dataset.scale, dataset.x_train.dtype) == ((8, 8, 3), 255.0, np.uint8)
    again = load("random", data_args={"samples": 300, "shape": (8, 8, 3), "classes": 3})
    np.testing.assert_array_equal(dataset.x_train, again.x_train)
    other = load("random", data_args={"samples": 300, "shape": (8, 8, 3), "classes": 3}, seed=1)
    assert not np.array_equal(dataset.x_train, other.x_train)
    means = np.stack([dataset.x_train[dataset.y_train == label].mean(0) for label in range(3)])
    distance = ((dataset.x_val[:, None] - means) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == dataset.y_val).mean() > 0.9


@pytest.mark.parametrize("shape", [784, (784,), [784]])
def test_random_rows(shape):
    assert load("random", data_args={"samples": 50, "shape": shape}).input_shape == (784,)


@pytest.mark.parametrize(
    ("data_args", "field"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": 2.5}, "samples"),
        ({"samples": True}, "samples"),
        ({"samples": 10**15}, "samples"),
        ({"samples": "many"}, "samples"),
        ({"shape": (28, 28)}, "shape"),
        ({"shape": (0,)}, "shape"),
        ({"shape": "28x28"}, "shape"),
        ({"shape": ()}, "shape"),
        ({"classes": 1}, "classes"),
        ({"samples": 5, "classes": 6}, "classes"),
        ({"sampels": 5}, "data_args"),
    ],
)
def test_random_data_that_cannot_be(data_args, field):
    for ask in (load, describe):
        with pytest.raises(DataError) as caught:
            ask("random", data_args=data_args)
        assert caught.value.field == field


@pytest.mark.parametrize("validation", [0.2, 0.35, 0, None])
@pytest.mark.parametrize("name", ["digits", "random"])
def test_a_description_tells_what_loading_gives(name, validation):
    args = {"samples": 333, "shape": (5, 5, 1), "classes": 4} if name == "random" else None
    told, dataset = (ask(name, data_args=args, validation=validation) for ask in (describe, load))
    assert told.label == dataset.label
    assert (told.train_samples, told.val_samples) == (dataset.train_samples, dataset.val_samples)
    assert (told.input_shape, told.classes, told.scale) == (dataset.input_shape, dataset.outputs, dataset.scale)
    assert told.nbytes == dataset.nbytes
    assert told.samples == told.train_samples + told.val_samples


def test_descriptions_need_no_network_and_no_memory(cache):
    assert NAMED == ("digits", "mnist", "fashion_mnist", "cifar10", "random")
    told = {name: describe(name) for name in NAMED}
    assert [name for name in NAMED if told[name].available] == ["digits", "random"]
    assert (told["cifar10"].train_samples, told["cifar10"].val_samples) == (50_000, 10_000)
    assert describe("mnist", validation=0).val_samples == 0
    assert describe("mnist", validation=0).train_samples == 60_000
    assert not cache.exists()
