"""README.md opens with the commands that CI runs."""

import re

from tests.architecture.source import ROOT


def test_the_first_shell_block_of_the_readme_is_the_demo_and_the_command_that_ci_tests_with():
    block = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    commands = [line.partition("#")[0].strip() for line in block[1].splitlines()]
    tested = re.search(r'^test_command="(.*)"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert tested
    assert commands == ["make demo", tested[1]]
