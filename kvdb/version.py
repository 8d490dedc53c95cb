"""The version of the distribution, in one place that every layer may read."""

__version__ = "0.1.0"
