"""A RAG engine as LangChain's chat model: `engine_adapter.langchain.chat_model` wants langchain-core."""
