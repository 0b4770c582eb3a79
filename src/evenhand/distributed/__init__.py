"""Training on many processes: ranks, the messages between them, and which rank holds which row."""
