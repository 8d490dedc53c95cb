"""Adapters that put kvdb under inference engines. Importing them changes nothing in an engine."""
