"""kvdb behind Hugging Face transformers.

with engine_adapter.transformers.attach(model, db) as engine:
    engine.store(name="contract.pdf", input_ids=document)
    engine.generate(document_and_question, max_new_tokens=64)
"""

from engine_adapter.transformers.attach import attach
from engine_adapter.transformers.described import spec_of
from engine_adapter.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine", "attach", "spec_of"]
