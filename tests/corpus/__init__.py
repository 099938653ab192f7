"""A corpus of planned programs as text, by which a refactor shows that it changed nothing: see __main__.py."""
