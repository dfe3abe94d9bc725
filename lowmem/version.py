"""The version, alone, so that it is read without importing anything."""

__version__ = "0.1.0"
