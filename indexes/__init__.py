"""What finds the tokens a query needs. Sees arrays only: nothing of storage, sessions or models."""
