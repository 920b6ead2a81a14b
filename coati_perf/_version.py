"""The version, kept here alone; pyproject.toml reads it."""

__version__ = "0.1.0"
