"""Paged blocks: who owns which, and where they lie. Sees blocks only: nothing of tokens' ids, contexts or queries."""
