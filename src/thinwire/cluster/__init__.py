"""Where workers run. Nothing is imported here, so that `thinwire.cluster.nursery` can start before torch is loaded."""
