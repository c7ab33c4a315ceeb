"""The driver's state machine of a run, and the loop that feeds it."""
