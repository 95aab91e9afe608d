"""Helpers that every package may use: text, coercion, documents, optional imports, digests."""
