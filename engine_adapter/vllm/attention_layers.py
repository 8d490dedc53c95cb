"""Handing the attention of vLLM's layers over to kvdb, where the plugin has made them kvdb's."""

from collections.abc import Mapping
from typing import Any

from engine_adapter.vllm.answers import Answers
from engine_adapter.vllm.log import LOG
from engine_adapter.vllm.packing import attention_of
from engine_adapter.vllm.plugin import KNOWN, is_known


def answer_layers(vllm_config: Any, layers: Mapping[str, int], answers: Answers) -> bool:
    """Let all layers be answered by kvdb, or none of them, which the log says. Returns which."""
    attentions = {number: attention_of(vllm_config, name).impl for name, number in layers.items()}
    reason = next((reason for impl in attentions.values() if (reason := _reason_against(impl))), None)
    if reason is not None:
        LOG.warning("kvdb steps aside: vLLM answers all attention itself: %s", reason)
        return False
    for number, impl in attentions.items():
        impl.answer_with(answers, number)
    return True


def _reason_against(impl: Any) -> str | None:
    if not is_known():
        return f"kvdb knows the attention of vLLM {', '.join(KNOWN)}, which this is not"
    from engine_adapter.vllm.attention import KvdbAttentionImpl  # an unknown version may have nothing of what it imports

    if not isinstance(impl, KvdbAttentionImpl):
        return "kvdb's plugin is not loaded; its entry point is kvdb of vllm.general_plugins, which VLLM_PLUGINS may exclude"
    return impl.reason_against()
