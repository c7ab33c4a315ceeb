"""Where workers run."""

from thinwire.cluster.local import Local

__all__ = ["Local"]
