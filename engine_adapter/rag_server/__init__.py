"""A RAG engine behind an endpoint as OpenAI's clients know it: `kvdb rag serve`. Only `command` imports without its libraries."""
