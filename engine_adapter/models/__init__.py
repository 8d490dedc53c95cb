"""The demo's models. Their weights are a distribution of their own, kvdb-demo-models, whose pyproject.toml is here."""
