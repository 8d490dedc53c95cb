"""What an installation takes from elsewhere is pinned, all of it."""

from collections.abc import Iterator
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.architecture.source import ROOT

EXTRAS = ("server", "aio", "tracing", "transformers", "rag", "plots", "dev")
OF_THE_DEVICE = ("cuda-", "nvidia-", "triton")  # what a torch for GPUs brings; constraints.txt is written with one for CPUs


def test_every_requirement_is_pinned_to_what_is_installed() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    needed = {name for name in closure("kvdb", EXTRAS) if not name.startswith(OF_THE_DEVICE)} - {"kvdb"}
    installed = {name: Version(distribution(name).version).public for name in needed}
    assert installed == {name: version for name, version in pinned.items() if name in needed}


def closure(name: str, extras: tuple[str, ...]) -> set[str]:
    """The distribution, everything that it requires with these extras, and so on."""
    found, ahead = set(), [(name, extras)]
    while ahead:
        step = ahead.pop()
        if step not in found:
            found.add(step)
            ahead += requirements(*step)
    return {name for name, _ in found}


def requirements(name: str, extras: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for requirement in map(Requirement, distribution(name).requires or []):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), tuple(sorted(requirement.extras))
