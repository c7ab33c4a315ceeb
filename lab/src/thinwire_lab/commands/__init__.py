"""The commands that this package adds to `thinwire`; entry points in pyproject.toml name them."""
