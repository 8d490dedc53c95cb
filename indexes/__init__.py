"""Indexes: they find the tokens that a query needs. They see arrays only: nothing of storage, sessions or models."""
