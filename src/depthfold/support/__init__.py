"""Small helpers without a subject of their own: they know nothing about networks."""
