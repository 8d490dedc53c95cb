"""kvdb as a storage backend of SGLang's HiCache; SGLang loads `engine_adapter.sglang.storage` by its module path."""
