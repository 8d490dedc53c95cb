"""Reading a saved graph, and checking that it belongs to its keys."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from indexes import file
from indexes.base import IndexCorrupt, Int32
from indexes.blocks import Blocks
from indexes.hnsw.codes import Codes
from indexes.hnsw.settings import Settings


def restore(
    header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], blocks: Blocks, path: Path
) -> tuple[Settings, Codes, Int32]:
    """The parts of an index that `Hnsw.save` wrote. Raises IndexCorrupt where they do not fit the keys, or each other."""
    file.check_blocks(path, header, blocks)
    try:
        settings = Settings(**header["settings"])
        codes = Codes.restored(header, arrays, blocks, settings.degree, path)
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
