"""The long description of the distribution: README.md, without the links that lead nowhere outside of the repository."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RELATIVE_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)")


def dynamic_metadata(_settings: Mapping[str, Any], _project: Mapping[str, Any]) -> dict[str, Any]:
    """Called by scikit-build-core in the root of the project. A relative link, or picture, becomes its own text."""
    text = RELATIVE_LINK.sub(r"\1", Path("README.md").read_text(encoding="utf-8"))
    return {"readme": {"text": text, "content-type": "text/markdown"}}
