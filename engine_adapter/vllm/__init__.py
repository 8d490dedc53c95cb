"""kvdb as a cache behind vLLM; vLLM loads `engine_adapter.vllm.connector` by its module path."""
