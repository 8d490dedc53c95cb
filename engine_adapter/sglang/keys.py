"""The keys by which HiCache knows pages of KV, and the ids under which kvdb keeps them.

A key is the SHA-256, in hex, of the key before it and of the page's token ids, so it stands for everything from the first token
on. HiCache tells a storage backend keys and no tokens; so a page is kept under ids that are its key, and the pages of a chain of
keys are a prefix in kvdb as the tokens of a prompt are. The hash is that of SGLang's `get_hash_str`; a test compares them.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvdb.errors import InvalidArgument, Unsupported
from kvdb.types import Tokens

DIGEST = re.compile("[0-9a-f]{64}")
BITS = 16
"""How many bits of a key stand in one id."""
IDS = 256 // BITS
"""How many ids a key takes, so that a page has at least as many tokens."""


def check_page_size(page_size: int) -> None:
    """Raises Unsupported for pages with fewer tokens than a key has ids."""
    if page_size < IDS:
        raise Unsupported(f"pages have {page_size} tokens; kvdb keeps SGLang's pages of at least {IDS} (--page-size 64)")


def page_keys(tokens: Any, page_size: int, seed: str | None = None) -> list[str]:
    """The keys of all full pages of a prompt. tokens: n ids. seed: the key that the chain begins from: None, or of a request with
    an extra key or a cache salt what SGLang derives from it."""
    ids = np.ascontiguousarray(tokens, "<u4")
    keys = []
    before = bytes.fromhex(seed or "")
    for start in range(0, len(ids) - page_size + 1, page_size):
        before = hashlib.sha256(before + ids[start : start + page_size].tobytes()).digest()
        keys.append(before.hex())
    return keys


def page_ids(keys: Sequence[str], page_size: int) -> Tokens:
    """The ids under which the pages of a chain are kept, `page_size` for each key. Raises InvalidArgument for what is no key,
    and Unsupported for pages that are too short."""
    check_page_size(page_size)
    ids = np.zeros((len(keys), page_size), np.int32)
    for row, key in zip(ids, keys, strict=True):
        if not DIGEST.fullmatch(key):
            raise InvalidArgument(f"{key!r:.100} is not the SHA-256 of a page, in hex")
        row[:IDS] = np.frombuffer(bytes.fromhex(key), "<u2")
    return ids.reshape(-1)


def chain(before: Iterable[str] | None, keys: Iterable[str]) -> list[str]:
    """All keys from the first page of a prompt on."""
    return [*(before or ()), *keys]
