"""Helpers for all packages: text, conversion of arguments, JSON documents, CSV files and optional imports."""
