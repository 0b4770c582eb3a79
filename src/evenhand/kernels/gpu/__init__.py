"""One training step in Triton: fixed shapes, no word to the host, the same bits on every run."""
