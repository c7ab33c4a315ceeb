"""The commands that this package adds to `thinwire`; the entry points in pyproject.toml name them."""
