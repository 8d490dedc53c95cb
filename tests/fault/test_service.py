"""The short form of `make fault-service`."""

from tests.fault import service


def test_after_faults_of_the_network_all_is_accounted_for():
    assert service.run(seconds=60, seed=1, rounds_max=2) == 2
