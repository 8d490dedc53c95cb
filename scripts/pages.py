"""What mkdocs does beside rendering docs/: pages of the repository's root, links between both, reference pages, and llms.txt."""

import argparse
import importlib
import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvdb.__main__ import _parser

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "benchmarks/README.md")
"""Pages that stand outside of docs/ and are part of the site, below repository/."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
NAMES = re.compile(r"^<!-- names: (\S+) -->$", re.MULTILINE)
COMMANDS = "<!-- commands -->"
log = logging.getLogger("mkdocs.plugins.pages")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A folder in the navigation becomes its pages."""
    config.nav = [_expanded(entry) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that stand outside of docs/."""
    pictures = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "benchmarks" / "plots").glob("*.png"))]
    for path in (*PAGES, *pictures):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_given: object) -> str:
    """Let links lead to pages of the site, and fill reference pages."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if not target or ":" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(here)), target))
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not there", here, target)
        there = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
        if files.get_file_from_path(there) is None:
            return text  # a file of the sources
        return f"{picture}[{text}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"

    markdown = LINK.sub(moved, markdown)
    markdown = NAMES.sub(lambda found: "\n\n".join(f"::: {name}" for name in _names(found[1])), markdown)
    return markdown.replace(COMMANDS, "\n".join(_commands(_parser())))


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt: what the site is, and each page with what it says first."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for title, uri in _leaves(config.nav or []):
        text = (ROOT / _in_repository(uri)).read_text(encoding="utf-8")
        heading = re.search(r"^# (.*)$", text, re.MULTILINE)
        lines.append(f"- [{title or (heading[1] if heading else uri)}]({uri.removesuffix('.md')}.html): {_first_sentence(text)}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_repository(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def _expanded(entry: object) -> object:
    if not isinstance(entry, dict):
        return entry
    ((title, value),) = entry.items()
    if isinstance(value, str) and value.endswith("/"):
        return {title: [f"{value}{page.name}" for page in sorted((ROOT / "docs" / value).glob("*.md"))]}
    return {title: [_expanded(below) for below in value]} if isinstance(value, list) else entry


def _leaves(nav: list[object], title: str = "") -> Iterator[tuple[str, str]]:
    """Title, "" for that of the page itself, and source of each page."""
    for entry in nav:
        if isinstance(entry, str):
            yield title, entry
        elif isinstance(entry, dict):
            for below, value in entry.items():
                yield from _leaves(value) if isinstance(value, list) else [(below, value)]


def _first_sentence(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    prose = next((part for part in paragraphs if part.strip() and not part.lstrip().startswith(("#", "|", "<", "-"))), "")
    plain = LINK.sub(lambda link: link[2], " ".join(prose.split()))
    return re.split(r"(?<=\.) ", plain)[0]


def _names(module: str) -> list[str]:
    return [f"{module}.{name}" for name in importlib.import_module(module).__all__ if name != "errors"]


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The help of a command and of those below it, each under a heading."""
    os.environ["COLUMNS"] = "100"
    yield f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _commands(below)
