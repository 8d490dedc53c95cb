"""Answers from documents in any order: each is computed once, and every prompt is laid out of what is stored."""

from engine_adapter.rag.answers import Answer, Usage
from engine_adapter.rag.chat import ChatFormat
from engine_adapter.rag.check import Check, CheckRow
from engine_adapter.rag.document import DocumentInfo
from engine_adapter.rag.engine import RagEngine
from engine_adapter.rag.retrieved import Retrieved
from engine_adapter.rag.stream import AnswerStream

__all__ = ["Answer", "AnswerStream", "ChatFormat", "Check", "CheckRow", "DocumentInfo", "RagEngine", "Retrieved", "Usage"]
