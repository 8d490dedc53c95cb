"""Arrays of the caller's kind: numpy (with ml_dtypes.bfloat16) and torch go in, and the kind that came in goes out.

torch is never imported here; it is there when a tensor of it is.
"""

import sys
from typing import Any

import numpy as np

from kvdb.errors import DtypeError
from kvdb.types import DTYPES, Array

_BFLOAT16 = DTYPES["bfloat16"]


def to_numpy(array: Any) -> Array:
    """The array as numpy, without a copy if it lies in main memory. Raises DtypeError for what is neither numpy nor torch."""
    if isinstance(array, np.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        tensor = array.detach() if array.requires_grad else array
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(_BFLOAT16)  # type: ignore[no-any-return]
        return tensor.numpy()  # type: ignore[no-any-return]
    raise DtypeError(f"an array is a {type(array).__name__}; expected a numpy array or a torch tensor")


def like(out: Array, given: Any) -> Any:
    """`out` in the kind, and on the device, of the array the caller gave."""
    if isinstance(given, np.ndarray):
        return out
    torch = sys.modules["torch"]
    if out.dtype == _BFLOAT16:
        tensor = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(out)
    return tensor if given.is_cpu else tensor.to(given.device)


def token_ids(tokens: Any) -> Any:
    """Token ids as something numpy takes: torch tensors become numpy arrays, everything else is left as it is."""
    return to_numpy(tokens) if type(tokens).__module__.startswith("torch") else tokens
