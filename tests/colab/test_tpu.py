"""Colab's TPU runtime as far as it can be had here: JAX and Keras, no TensorFlow, a TPU on a made-up PCI bus."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
ABSENT = ("tensorflow", "tf_keras", "accel_nb", "__editable__")  # accel_nb is found where the tests find it
ROOT = Path(__file__).resolve().parents[2]
ADDED = {"libtpu": "0.0.21.1"}  # the runtime for TPUs, of which only the metadata are looked at

LOOK = """
import json, re, sys
from dataclasses import replace
import accel_nb.diagnose, accel_nb.machine

machine = accel_nb.machine.machine
tpu = machine(root={bus!r}).tpu
accel_nb.diagnose.look = lambda: replace(machine(), tpu=tpu)
here = accel_nb.diagnose.accelerators()
import accel_nb as anb

def every(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from every(child)

panel = anb.Studio(framework="tensorflow")
assert panel.settled(120)
told = [re.sub("<[^>]*>", " ", str(getattr(one, "value", ""))) for one in every(panel.ui)]
print(json.dumps({{"verdicts": here.to_dict()["verdicts"], "panel": " ".join(" ".join(told).split()),
                  "resolved": panel.plan.resolve(machine=here.machine, diagnosis=here.diagnosis).plan.strategy}}))
"""
TRAIN = """
import json, sys
import accel_nb as anb

run = anb.train(framework="tensorflow", strategy="tpu", accelerator="cpu", devices=2, epochs=2)
print(json.dumps([run.status, run.started["versions"], len(run.history), "tensorflow" in sys.modules]))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The command and surroundings of a Python that has all of this environment but TensorFlow."""
    folder = tmp_path_factory.mktemp("image")
    shared = folder / "shared"
    shared.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(ABSENT):
            (shared / path.name).symlink_to(path)
    for name, version in ADDED.items():
        told = shared / f"{name}-{version}.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    venv.create(folder / "python", with_pip=False, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "python"), "platbase": str(folder / "python")})
    (Path(site) / "of-the-tests.pth").write_text(f"{shared}\n{ROOT}\n")
    return {
        "python": str(folder / "python" / "bin" / "python"),
        "ACCEL_NB_CACHE": str(folder / "cache"),
        "ACCEL_NB_RUNS": str(folder / "runs"),
        "PYTHONNOUSERSITE": "1",
        "COLAB_RELEASE_TAG": "release-colab",
    }


def run(image: dict[str, str], source: str, folder: Path) -> Any:
    """What a program prints last, as JSON."""
    env = {**os.environ, **image}
    command = [env.pop("python"), "-c", source]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def bus(folder: Path) -> str:
    """A PCI bus with one v5e chip."""
    chip = folder / "sys" / "bus" / "pci" / "devices" / "0000:00:04.0"
    chip.mkdir(parents=True)
    for name, number in {"vendor": "0x1ae0", "device": "0x0063", "class": "0x120000"}.items():
        (chip / name).write_text(number)
    return str(folder)


def test_the_panel_offers_keras_on_jax_and_says_how_else(image, tmp_path):
    told = run(image, LOOK.format(bus=bus(tmp_path)), tmp_path)
    tensorflow = told["verdicts"]["tensorflow"]
    assert not tensorflow["cpu"]["usable"]
    assert tensorflow["tpu"]["usable"]
    assert tensorflow["tpu"]["details"]["route"] == "keras_jax"
    assert "tensorflow-tpu" in tensorflow["tpu"]["text"]
    assert "TPU v5e" in told["panel"]
    assert tensorflow["tpu"]["text"] in told["panel"]
    assert told["resolved"] == "tpu"
    pytorch = told["verdicts"]["pytorch"]["tpu"]  # Colab has torch_xla; here there may be PyTorch without it
    assert pytorch["usable"] or "torch_xla" in pytorch["fix"] or "torch-tpu" in pytorch["fix"]


def test_keras_on_jax_trains_without_tensorflow(image, tmp_path):
    """On devices that the CPU plays: the program, and the kernel, do without TensorFlow."""
    status, versions, steps, loaded = run(image, TRAIN, tmp_path)
    assert status == "done"
    assert {"jax", "keras"} <= set(versions)
    assert "tensorflow" not in versions
    assert steps > 0
    assert not loaded
