"""Immutable runs of tokens, and what sessions and contexts see of them."""
