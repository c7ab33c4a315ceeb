"""The `thinwire` command."""
