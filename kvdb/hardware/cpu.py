"""The settings of processors, as the native code takes them."""

import kvdb._native as _native
from kvdb.config import CpuConfig


def use(settings: CpuConfig) -> None:
    """Set the threads of this process, where the settings name a number."""
    if settings.threads is not None:
        _native.set_threads(settings.threads)
