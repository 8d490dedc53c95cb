"""The entry point `vllm.general_plugins`: every process of vLLM calls `register` before it builds a model.

It names kvdb's attention in place of vLLM's on the CPU, which is vLLM's own class unless a connector is configured with
attention. Registering imports neither of the two.
"""

import vllm

KNOWN = ("0.32.0",)
"""The versions whose attention kvdb's was tested against."""
BACKEND = "engine_adapter.vllm.attention.KvdbAttentionBackend"


def is_known() -> bool:
    """Whether this is a version of vLLM whose attention kvdb knows."""
    return str(vllm.__version__).split("+")[0] in KNOWN


def register() -> None:
    """Register kvdb's attention. On a version that is not known nothing is done; the connector says so where it is configured."""
    if is_known():
        # another version may have no such module
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
