"""What `make nightly` runs: too slow for `make test` (see CONTRIBUTING.md)."""
