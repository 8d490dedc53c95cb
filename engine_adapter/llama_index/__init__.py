"""A RAG engine under LlamaIndex: `engine_adapter.llama_index.synthesizer` and `.llm` want llama-index-core."""
