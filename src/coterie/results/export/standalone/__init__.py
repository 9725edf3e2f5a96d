"""Code that is copied into exported folders, where it runs without Coterie: nothing here imports it."""
