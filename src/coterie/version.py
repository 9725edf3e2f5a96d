"""The version of Coterie, which run folders and reports name."""

__version__ = "0.1.0"
