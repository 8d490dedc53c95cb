"""The caller's arrays: numpy (with ml_dtypes.bfloat16) or torch. Answers are arrays of the same library as the question.

torch is never imported here: a caller with a tensor has imported it.
"""

import sys
from typing import Any

import numpy as np

from kvdb.errors import DtypeError
from kvdb.types import DTYPES, Array, KeysValues

_BFLOAT16 = DTYPES["bfloat16"]


def to_numpy(array: Any) -> Array:
    """The array as numpy, without a copy if it lies in main memory. Raises DtypeError for anything but numpy or torch."""
    if isinstance(array, np.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        tensor = array.detach() if array.requires_grad else array
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(_BFLOAT16)  # type: ignore[no-any-return]
        try:
            return tensor.numpy()  # type: ignore[no-any-return]
        except TypeError as error:
            raise DtypeError(f"a tensor of {tensor.dtype} is no array of numpy's ({error}); expected the spec's dtype") from None
    raise DtypeError(f"an array is a {type(array).__name__}; expected a numpy array or a torch tensor")


def keys_values(k: Any, v: Any) -> KeysValues:
    """Keys and values as numpy. v: None where the values of a layer lie in its keys, which becomes an array without numbers.
    Raises DtypeError."""
    keys = to_numpy(k)
    return keys, keys[..., :0] if v is None else to_numpy(v)


def like(out: Array, given: Any) -> Any:
    """`out` as an array of the library of `given`, and on its device."""
    if isinstance(given, np.ndarray):
        return out
    torch = sys.modules["torch"]
    if out.dtype == _BFLOAT16:
        tensor = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(out)
    return tensor if given.is_cpu else tensor.to(given.device)


def token_ids(tokens: Any) -> Any:
    """Token ids as numpy can take them: torch tensors become numpy arrays, everything else is left as it is."""
    return to_numpy(tokens) if type(tokens).__module__.startswith("torch") else tokens
