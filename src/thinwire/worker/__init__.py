"""The stepping thread of one worker."""
