"""Makes calls of a store in any order, with ends and kills between them, and compares with a dictionary; see `test_any_order`.

python -m tests.fault.any_order --examples 100 --steps 100 --seed 1
"""

import argparse
import logging
import sys

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fault.test_any_order import StoreMachine


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100, help="stores")
    parser.add_argument("--steps", type=int, default=100, help="at most, of each")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.getLogger("kvdb").setLevel(logging.CRITICAL)
    carried_out = []

    class Counted(StoreMachine):
        """Counts the calls that were made."""

        def teardown(self):
            carried_out.append(self.steps)
            super().teardown()

    long = settings(
        max_examples=given.examples,
        stateful_step_count=given.steps,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(given.seed)(Counted), settings=long)
    sys.stdout.write(f"{len(carried_out)} stores, {sum(carried_out)} calls, at most {max(carried_out)} of one store: ")
    sys.stdout.write("what is there is what a dictionary says\n")


if __name__ == "__main__":
    main()
