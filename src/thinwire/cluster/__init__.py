"""Where workers run.

Nothing is imported here, so that `thinwire.cluster.fork_server` can start before torch is loaded.
"""
