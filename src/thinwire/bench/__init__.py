"""The measured comparisons: `thinwire bench NAME`."""
