"""Which kernels each operation uses: what was timed decides, then a table, never anything this machine cannot run."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

import kvdb
import kvdb.hardware.kernels as kernels
import kvdb.hardware.profile as profile
from kvdb import _native
from kvdb.config import Config, OptimizerConfig
from kvdb.errors import ConfigError
from query_optimizer.cost import Machine
from tests.kvdb.native.test_module import run


@pytest.fixture(autouse=True)
def as_before():
    before = _native.kernels()
    yield
    for operation, isa in before.items():
        _native.set_kernels(operation, isa)


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(1e-6, 1.0), min_size=1), st.sampled_from("abcde"))
def test_nothing_chosen_is_notably_slower_than_the_fastest(times, preferred):
    chosen = kernels.fastest(times, preferred)
    assert times[chosen] * (1 - kernels.KNOWN_GAIN_MIN) <= min(times.values())
    if times.get(preferred, 2.0) <= min(times.values()):
        assert chosen == preferred


@pytest.mark.parametrize(("family", "chosen"), [("AMD Zen 4", "avx512_bf16"), ("", "avx512")])
def test_a_noisy_second_does_not_overrule_the_table(monkeypatch, family, chosen):
    monkeypatch.setattr(_native, "processor_family", lambda: family)
    assert kernels.fastest({"avx512_bf16": 0.513, "avx512": 0.395}, "avx512_bf16") == chosen


WIDENED = {"decode": "avx512", "prefill": "amx", "scan": "avx512_bf16", "gather": "avx512"}
PAIRS = dict.fromkeys(WIDENED, "avx512_bf16")


@pytest.mark.parametrize(
    ("processor", "name", "used"),
    [
        (("GenuineIntel", 6, 0x8F), "Intel Sapphire Rapids", WIDENED),
        (("GenuineIntel", 6, 167), "Intel with AVX-512 BF16", WIDENED),  # as a hypervisor gave it for Sapphire Rapids
        (("GenuineIntel", 19, 1), "Intel with AVX-512 BF16", WIDENED),
        (("AuthenticAMD", 0x19, 0x11), "AMD Zen 4", PAIRS),
        (("AuthenticAMD", 0x1B, 0x00), "AMD with AVX-512 BF16", PAIRS),
    ],
)
def test_the_table_goes_by_features_where_it_does_not_know_the_model(processor, name, used):
    assert _native.kernels_of(*processor, avx512_bf16=True) == (name, used)


@pytest.mark.parametrize(
    "processor", [("GenuineIntel", 6, 0x6A), ("AuthenticAMD", 0x19, 1), ("HygonGenuine", 0x18, 1), ("", 0, 0)]
)
def test_processors_without_these_features_have_no_row(processor):
    assert _native.kernels_of(*processor, avx512_bf16=False) == ("", {})


def test_what_was_timed_decides_for_each_operation_by_itself():
    slowest = _native.variants()[-1]
    others = _native.kernels()
    times = {"prefill": {isa: 1.0 + (isa != slowest) for isa in _native.variants()}}
    kernels.use(times)
    assert _native.kernels() == others | {"prefill": slowest}
    prefill, decode = (next(c for c in kernels.choices(times) if c.operation == name) for name in ("prefill", "decode"))
    assert (prefill.isa, prefill.reason, prefill.speeds[slowest]) == (slowest, "measured", 1.0)
    assert (decode.isa, decode.speeds) == (others["decode"], {})
    assert kernels.described(prefill).startswith(f"{slowest}, measured: {slowest} 1.00")


def test_times_of_what_this_machine_cannot_run_are_passed_over():
    before = _native.kernels()
    kernels.use({"decode": {"sse9": 1e-9}, "dream": {_native.variants()[-1]: 1e-9}})
    assert _native.kernels() == before


def test_measuring_calls_every_variant_and_leaves_what_was_used():
    before, called = _native.kernels(), set()
    times = kernels.measure({name: lambda name=name: called.add((name, _native.kernels()[name])) for name in before}, 0.0)
    assert _native.kernels() == before
    assert called == {(name, isa) for name in before for isa in _native.variants()}
    assert {name: set(of) for name, of in times.items()} == {name: set(_native.variants()) for name in before}


def test_a_database_uses_what_the_file_says(tmp_path):
    path, slowest = tmp_path / "machine.json", _native.variants()[-1]
    times = {"scan": {isa: 1.0 + (isa != slowest) for isa in _native.variants()}}
    profile.write(path, Machine(), kernels=times)
    assert profile.load(str(path)).kernels == times
    with kvdb.connect(config=Config(optimizer=OptimizerConfig(machine_file=str(path)))):
        assert _native.kernels()["scan"] == slowest


@pytest.mark.parametrize(
    "damaged", [3, {"scan": 3}, {"scan": {"avx2": "fast"}}, {"scan": {"avx2": -1}}, {"scan": {"avx2": None}}]
)
def test_damaged_times_are_refused(tmp_path, damaged):
    path = tmp_path / "machine.json"
    profile.write(path, Machine())
    kept = json.loads(path.read_text())
    kept["entries"][0]["kernels"] = damaged
    path.write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match="kvdb calibrate"):
        profile.read_kernels(path)
    assert not profile.load(str(path)).measured


def test_the_environment_sets_the_kernels_of_every_operation():
    show = "from kvdb import _native; print(*set(_native.kernels().values()), *_native.variants())"
    assert run(show, KVDB_ISA="portable").stdout.split() == ["portable", "portable"]


def test_wrong_choices_are_refused():
    with pytest.raises(ValueError, match="operation: 'dream' is unknown"):
        _native.set_kernels("dream", "portable")
    with pytest.raises(ValueError, match="isa: 'sse9' is not an instruction set"):
        _native.set_kernels("scan", "sse9")
    show = f"from kvdb import _native; _native.set_kernels('scan', {_native.isas()[0]!r})"
    assert "is better than the portable that is in use" in run(show, KVDB_ISA="portable").stderr
