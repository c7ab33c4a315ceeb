"""`python -m thinwire`, for where the command itself is not on the path."""

from thinwire.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
