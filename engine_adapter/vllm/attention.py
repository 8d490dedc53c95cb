"""`KvdbAttentionBackend`: vLLM's attention on the CPU, with long requests' decode steps answered by kvdb.

vLLM's own kernel has the other rows of a batch, every prompt, and every row where kvdb steps aside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata

from engine_adapter.vllm.answers import Answers

CONFIGURED = "attention"
"""The key of `kv_connector_extra_config` without which every layer is vLLM's own."""


class KvdbAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]  # without vllm its base is not known
    """vLLM's backend, by its name. Where no connector is configured with attention, its layers are vLLM's own class."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        given = get_current_vllm_config().kv_transfer_config
        extra = {} if given is None else given.kv_connector_extra_config
        return CPUAttentionBackendImpl if extra.get(CONFIGURED) is None else KvdbAttentionImpl


@dataclass(frozen=True)
class _Split:
    """A batch in two: the tokens that kvdb answers and those of vLLM's own kernel, int64, with the metadata of the latter; None
    where there are none."""

    answered: Tensor
    own: Tensor
    metadata: CPUAttentionMetadata | None


class KvdbAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]  # without vllm its base is not known
    """The attention of a layer. Until `answer_with` it is vLLM's own."""

    _answers: Answers | None = None
    _number = 0

    def answer_with(self, answers: Answers | None, number: int) -> None:
        """Let kvdb answer from now on, or not any more. number: that of the layer."""
        self._answers, self._number = answers, number

    def reason_against(self) -> str | None:
        """The part of this layer's attention that kvdb does not compute, None where it computes all."""
        if self.sliding_window != -1 or self.alibi_slopes is not None or self.sinks is not None or self.logits_soft_cap:
            return "its attention has a window, biases, sinks or a cap"
        if abs(self.scale * self.head_size**0.5 - 1) > 1e-6:
            return f"its attention is scaled by {self.scale}, not 1/sqrt({self.head_size})"
        return None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """vLLM's own attention, whose docstring says the shapes, but for the rows that kvdb answers."""
        own: Callable[..., Tensor] = super().forward
        scales = output_scale, output_block_scale
        if self._answers is None or attn_metadata is None:
            return own(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        split: _Split = self._answers.once(attn_metadata, lambda rows: self._split(layer, attn_metadata, rows, query.dtype))
        tokens = split.answered
        out = self._answers.attend(self._number, query[tokens], key[tokens], value[tokens]) if len(tokens) else None
        if out is None:
            return own(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        output[tokens] = out
        if split.metadata is not None:
            rest = torch.empty_like(output[split.own])
            own(layer, query[split.own], key[split.own], value[split.own], kv_cache, split.metadata, rest, *scales)
            output[split.own] = rest
        return output

    def _split(self, layer: Any, batch: CPUAttentionMetadata, rows: Sequence[int], dtype: torch.dtype) -> _Split:
        """The rows that kvdb answers have one token each."""
        answered = batch.query_start_loc[torch.tensor(rows, dtype=torch.int64)].long()
        taken = set(rows)
        left = torch.tensor([i for i in range(len(batch.seq_lens)) if i not in taken], dtype=torch.int64)
        if not len(left) or not rows:
            return _Split(answered, left, None)
        counts = (batch.query_start_loc[1:] - batch.query_start_loc[:-1])[left]
        starts = torch.zeros(len(left) + 1, dtype=batch.query_start_loc.dtype)
        torch.cumsum(counts, 0, out=starts[1:])
        own = torch.cat([torch.arange(*batch.query_start_loc[i : i + 2].tolist()) for i in left.tolist()])
        lengths = batch.seq_lens[left].contiguous()
        scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(left),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            seq_lens=lengths,
            dtype=dtype,
            query_start_loc=starts,
            causal=batch.causal,
            sliding_window_size=self.sliding_window,
            isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        metadata = replace(
            batch,
            num_actual_tokens=len(own),
            max_query_len=int(counts.max()),
            query_start_loc=starts,
            max_seq_len=int(lengths.max()),
            seq_lens=lengths,
            block_table=batch.block_table[left].contiguous(),
            slot_mapping=batch.slot_mapping[own],
            scheduler_metadata=scheduler_metadata,
        )
        return _Split(answered, own, metadata)
