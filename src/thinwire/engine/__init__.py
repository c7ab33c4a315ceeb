"""The loop, the coordinator and the ports through which everything else enters."""
