"""The NVIDIA driver's answers: NVML, `nvidia-smi`, and what CUDA_VISIBLE_DEVICES leaves of the cards."""

import pytest
from fake_nvidia import A100, NVML, SMI_ROW, T4, smi_script, write_smi

from accel_nb import nvidia
from accel_nb.nvidia import GPU, MIB, Driver, GPUUsage, gpu_usage, read_driver, visible_gpus

NOWHERE = {"PATH": ""}


@pytest.fixture(autouse=True)
def no_driver_of_this_machine(monkeypatch):
    monkeypatch.setattr(nvidia, "load_nvml", lambda: None)
    monkeypatch.setattr(nvidia, "SMI_PLACES", ())


def with_nvml(monkeypatch, **told):
    fake = NVML(**told)
    monkeypatch.setattr(nvidia, "load_nvml", lambda: fake)
    return fake


def test_without_a_driver_nothing_is_there_and_nothing_is_wrong():
    assert read_driver(NOWHERE) == Driver()
    assert gpu_usage(0, NOWHERE) is None


def test_the_real_package_without_a_driver_answers_the_same(monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pytest.skip("this machine has an NVIDIA driver")
    monkeypatch.setattr(nvidia, "load_nvml", lambda: pynvml)
    assert read_driver(NOWHERE) == Driver()
    assert gpu_usage(0, NOWHERE) is None


def test_nvml_tells_cards_driver_and_its_cuda(monkeypatch):
    with_nvml(monkeypatch, cards=[T4, A100])
    assert read_driver(NOWHERE) == Driver(
        "550.54.15",
        (12, 4),
        (
            GPU(0, "Tesla T4", 16106127360, 16106127360 - 268435456, (7, 5), T4["uuid"]),
            GPU(1, "NVIDIA A100-SXM4-40GB", 42949672960, 42949672960 - 1073741824, (8, 0), A100["uuid"]),
        ),
    )


def test_older_nvml_packages_tell_bytes(monkeypatch):
    with_nvml(monkeypatch, cards=[T4], old=True)
    driver = read_driver(NOWHERE)
    assert (driver.version, driver.gpus[0].name, driver.gpus[0].uuid) == ("550.54.15", "Tesla T4", T4["uuid"])


def test_what_a_card_does_not_tell_is_left_open(monkeypatch):
    fails = dict.fromkeys(
        ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetName"), "Not Supported"
    )
    with_nvml(monkeypatch, cards=[T4], fails=fails)
    assert read_driver(NOWHERE).gpus == (GPU(0, "NVIDIA GPU", 0, 0, None, T4["uuid"]),)


def test_a_card_that_fell_off_the_bus_is_left_out(monkeypatch):
    with_nvml(monkeypatch, cards=[T4, A100], fails={"nvmlDeviceGetHandleByIndex(0)": "GPU is lost"})
    assert [gpu.index for gpu in read_driver(NOWHERE).gpus] == [1]


def test_a_driver_that_does_not_answer_says_why(monkeypatch):
    text = "RM has detected an NVML/RM version mismatch."
    with_nvml(monkeypatch, fails={"nvmlInit": text})
    assert read_driver(NOWHERE) == Driver(error=text)


def test_a_missing_library_is_no_driver_and_not_an_error(monkeypatch):
    with_nvml(monkeypatch, fails={"nvmlInit": "NVML Shared Library Not Found"})
    assert read_driver(NOWHERE) == Driver()


def test_usage_through_nvml(monkeypatch):
    with_nvml(monkeypatch, cards=[T4, A100])
    assert gpu_usage(0, NOWHERE) == GPUUsage(0.71, 268435456, 16106127360)
    assert gpu_usage(1, NOWHERE).utilization == 0.05
    assert gpu_usage(2, NOWHERE) is None


def test_usage_where_the_share_is_not_told(monkeypatch):
    with_nvml(monkeypatch, cards=[T4], fails={"nvmlDeviceGetUtilizationRates": "Not Supported"})
    assert gpu_usage(0, NOWHERE) == GPUUsage(None, 268435456, 16106127360)


def test_nvidia_smi_answers_where_the_package_is_absent(tmp_path):
    env = write_smi(tmp_path / "bin", smi_script())
    env["PATH"] += ":/bin:/usr/bin"
    card = GPU(0, "Tesla T4", 15360 * MIB, 15101 * MIB, (7, 5), T4["uuid"])
    assert read_driver(env) == Driver("550.54.15", (12, 4), (card,))
    assert gpu_usage(0, env) == GPUUsage(0.71, 259 * MIB, 15360 * MIB)


def test_nvidia_smi_answers_where_nvml_does_not(tmp_path, monkeypatch):
    with_nvml(monkeypatch, fails={"nvmlInit": "Unknown Error"})
    env = write_smi(tmp_path / "bin", smi_script())
    env["PATH"] += ":/bin:/usr/bin"
    assert read_driver(env).gpus[0].name == "Tesla T4"


@pytest.mark.parametrize("word", ["UMD ", ""])
def test_the_head_of_newer_tables_is_read_too(tmp_path, word):
    head = f"| NVIDIA-SMI 590.1   KMD Version: 590.1   CUDA {word}Version: 13.1 |\n"
    env = write_smi(tmp_path / "bin", smi_script(head=head))
    env["PATH"] += ":/bin:/usr/bin"
    assert read_driver(env).cuda == (13, 1)


def test_an_old_nvidia_smi_does_not_know_the_capability(tmp_path):
    row = SMI_ROW.rpartition(",")[0]
    env = write_smi(
        tmp_path / "bin",
        f"""case "$*" in
*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;;
*--query-gpu*) echo "{row}" ;;
esac
""",
    )
    driver = read_driver(env)
    assert (driver.gpus[0].name, driver.gpus[0].capability, driver.cuda) == ("Tesla T4", None, None)


def test_numbers_that_nvidia_smi_does_not_have(tmp_path):
    row = f"0, Tesla T4, {T4['uuid']}, [N/A], [Not Supported], 550.54.15, [N/A]"
    env = write_smi(tmp_path / "bin", smi_script(row))
    env["PATH"] += ":/bin:/usr/bin"
    assert read_driver(env).gpus == (GPU(0, "Tesla T4", 0, 0, None, T4["uuid"]),)


def test_an_nvidia_smi_that_fails_says_why(tmp_path):
    text = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
    env = write_smi(tmp_path / "bin", f"echo '{text}'; exit 9\n")
    assert read_driver(env) == Driver(error=text)


def test_an_nvidia_smi_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "SMI_SECONDS", 0.2)
    env = write_smi(tmp_path / "bin", "exec /bin/sleep 600\n")
    assert read_driver(env) == Driver(error="nvidia-smi gave no answer within 0.2 s.")


def test_an_nvidia_smi_that_prints_nonsense_names_no_card(tmp_path):
    env = write_smi(tmp_path / "bin", 'echo "hello, world"; echo "x,y,z,1,2,3,4"\n')
    assert read_driver(env).gpus == ()


CARDS = (GPU(0, "A", uuid="GPU-aaaa-1"), GPU(1, "B", uuid="GPU-aabb-2"), GPU(2, "C", uuid="GPU-cc-3"))


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, (0, 1, 2)),  # not set
        ("", ()),  # set to nothing
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", (0,)),
        ("2,0", (2, 0)),  # in this order
        (" 1 , 2 ", (1, 2)),
        ("0,9,1", (0,)),  # ends at the first that is not there
        ("1,-1,0", (1,)),
        ("GPU-cc", (2,)),
        ("GPU-aa", ()),  # the beginning of two
        ("GPU-aabb-2,0", (1, 0)),
        ("0,0", (0,)),
        ("MIG-3b5c", (0, 1, 2)),  # a slice does not say of which card
    ],
)
def test_what_cuda_visible_devices_leaves(setting, left):
    assert visible_gpus(setting, CARDS) == left
