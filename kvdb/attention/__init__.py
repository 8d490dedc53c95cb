"""Attention over parts: states, their merge, and the execution of a plan."""

from kvdb.attention.state import AttentionState, merge

__all__ = ["AttentionState", "merge"]
