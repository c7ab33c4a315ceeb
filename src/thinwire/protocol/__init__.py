"""What goes between processes: messages by kind, identifiers, chunks, deadlines, and the clock that all wait by."""
