"""What the driver says is what is found, and what is missing is named with its remedy. The driver is a stand-in here."""

import ctypes
from importlib.machinery import ModuleSpec

import pytest

import kvdb.gpu.probe as probe
from kvdb.gpu.probe import Card, Driver, TorchBuild

H200 = Card("NVIDIA H200", 150_754_820_096, (9, 0))
T4 = Card("Tesla T4", 15_843_721_216, (7, 5))


class Library:
    """libcuda with these cards. fails: the status of a call by its name."""

    def __init__(self, cards, **fails):
        self.cards, self.fails, self.ready = cards, fails, False

    def __getattr__(self, call):
        def called(*arguments):
            if status := self.fails.get(call, 0):
                return status
            assert self.ready or call in {"cuInit", "cuDriverGetVersion", "cuGetErrorString"}, f"{call} before cuInit"
            return getattr(Library, f"_{call}")(self, *(getattr(a, "_obj", a) for a in arguments)) or 0

        return called

    def _cuInit(self, flags):  # noqa: N802
        self.ready = True

    def _cuDriverGetVersion(self, version):  # noqa: N802
        version.value = 12080

    def _cuDeviceGetCount(self, count):  # noqa: N802
        count.value = len(self.cards)

    def _cuDeviceGet(self, device, index):  # noqa: N802
        device.value = 100 + index  # a handle, not the index

    def _cuDeviceGetName(self, name, size, device):  # noqa: N802
        name.value = self.cards[device.value - 100].name.encode()[: size - 1]

    def _cuDeviceTotalMem_v2(self, memory, device):  # noqa: N802
        memory.value = self.cards[device.value - 100].memory_total

    def _cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        value.value = self.cards[device.value - 100].capability[{75: 0, 76: 1}[attribute]]

    def _cuGetErrorString(self, status, text):  # noqa: N802
        text.value = f"error {status}".encode()


@pytest.fixture
def install(monkeypatch, tmp_path):
    """A driver of that library, and its version file."""

    def installed(library, version="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name: {probe.DRIVER_LIBRARY: library}[name])
        path = tmp_path / "version"
        if version:
            path.write_text(version)
        monkeypatch.setattr(probe, "DRIVER_VERSION", path)

    return installed


def test_cards_are_found_with_memory_and_capability(install):
    install(Library([H200, T4]))
    assert probe.find_driver() == Driver("570.86.10", "12.8", (H200, T4))


def test_a_name_may_be_longer_than_its_room(install):
    install(Library([Card("N" * 400, 1, (9, 0))]))
    assert probe.find_driver().cards[0].name == "N" * 255


def test_no_driver_is_none(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert probe.find_driver() is None


def test_a_driver_without_cards_and_one_that_fails_say_so(install):
    install(Library([], cuInit=probe.NO_DEVICE), version="")
    assert probe.find_driver() == Driver("", "12.8", (), "no card")
    install(Library([]))
    assert probe.find_driver().trouble == "no card"
    install(Library([H200], cuInit=803))
    assert probe.find_driver().trouble == "cuInit failed with 803, error 803"
    install(Library([H200], cuDeviceTotalMem_v2=999))
    assert probe.find_driver().trouble == "cuDeviceTotalMem_v2 failed with 999, error 999"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "__version__ = '2.6.0+cu126'\ndebug = False\ncuda: Optional[str] = '12.6'\nhip = None\n",
            TorchBuild("2.6.0+cu126", "12.6"),
        ),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", TorchBuild("2.13.0+cpu", None)),
        ("from somewhere import cuda\n", TorchBuild("", None)),
    ],
)
def test_torch_is_known_by_its_files(monkeypatch, tmp_path, text, found):
    (tmp_path / "version.py").write_text(text)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(probe, "find_spec", lambda name: spec)
    assert probe.installed_torch() == found


def test_the_torch_of_these_tests_is_known():
    import torch

    assert probe.installed_torch() == TorchBuild(torch.__version__, torch.version.cuda)


CUDA, CPU = TorchBuild("2.13.0", "12.8"), TorchBuild("2.13.0+cpu", None)


@pytest.mark.parametrize(
    ("device", "driver", "torch", "triton", "said"),
    [
        ("cuda", Driver("1", "12.8", (H200,)), CUDA, True, None),
        ("cuda:1", Driver("1", "12.8", (T4, H200)), CUDA, True, None),
        ("interpreter", None, CPU, True, None),
        ("cuda", None, CUDA, True, "no NVIDIA driver; install it"),
        ("cuda", Driver("1", "12.8", (), "no card"), CUDA, True, "no GPU .no card.; look at nvidia-smi"),
        ("cuda", Driver("1", "12.8", (T4, H200)), CUDA, True, "Tesla T4 has compute capability 7.5; kernels need 8.0"),
        ("cuda", Driver("1", "12.8", (H200,)), None, True, "torch is not installed; pip install 'kvdb.gpu.'"),
        ("interpreter", None, CPU, False, "triton is not installed; pip install 'kvdb.gpu.'"),
        ("cuda", Driver("1", "12.8", (H200,)), CPU, True, r"torch 2.13.0\+cpu is built without CUDA; install a build with it"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(monkeypatch, device, driver, torch, triton, said):
    monkeypatch.setattr(probe, "installed_torch", lambda: torch)
    monkeypatch.setattr(probe, "triton_installed", lambda: triton)
    missing = probe.missing_requirement(device, driver)
    if said is None:
        assert missing is None
    else:
        with pytest.raises(ValueError, match=said):
            raise ValueError(str(missing))
