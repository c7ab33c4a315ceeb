"""The composition root: what a run is, `fit`, the driver's side, and what a worker process starts with."""
