"""Modules applied to many parameter rows at once."""
