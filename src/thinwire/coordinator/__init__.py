"""The driver's state machine of a run, and the shell that feeds it."""
