"""What a file holds of an index, and whether it is that of the keys."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from indexes.base import IndexCorrupt, Int32
from indexes.blocks import Blocks
from indexes.hnsw.codes import Codes
from indexes.hnsw.settings import Settings

FINGERPRINT_TOKENS = 64


def fingerprint(blocks: Blocks) -> int:
    """CRC-32 of some keys of each head, spread evenly: a file of another layer or of other tokens does not have it."""
    crc = 0
    for token in np.unique(np.linspace(0, blocks.tokens - 1, FINGERPRINT_TOKENS).astype(int)) if blocks.tokens else ():
        for head in range(blocks.kv_heads):
            crc = zlib.crc32(blocks.keys(head, int(token), int(token) + 1).tobytes(), crc)
    return crc


def restore(
    header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], blocks: Blocks, path: Path
) -> tuple[Settings, Codes, Int32]:
    """What `Hnsw.save` wrote. Raises IndexCorrupt where it does not fit the keys, or itself."""
    try:
        if header["tokens"] != blocks.tokens or header["dtype"] != blocks.dtype or header["keys"] != fingerprint(blocks):
            raise IndexCorrupt(f"{path} is the index of other keys; expected {blocks.tokens} tokens of {blocks.dtype}")
        settings = Settings(**header["settings"])
        codes = Codes.restored(header, arrays, blocks, settings.degree)
        learnt = arrays["starts"]
    except IndexCorrupt:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise IndexCorrupt(f"{path} cannot be read ({error!r}); build the index again") from error
    if learnt.dtype != np.int32 or learnt.ndim != 2 or len(learnt) != blocks.kv_heads:
        raise IndexCorrupt(f"{path} has starts of shape {learnt.shape}; build the index again")
    if learnt.size and (learnt.min() < 0 or learnt.max() >= blocks.tokens):
        raise IndexCorrupt(f"{path} has starts beyond the {blocks.tokens} tokens; build the index again")
    return settings, codes, learnt
