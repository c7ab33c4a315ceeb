"""What processes send each other: messages by kind, identifiers, chunks and deadlines; and the clock of a run."""
