"""Training on many processes: who the ranks are, what they say to each other, who holds a row."""
