"""Mutants of the package, for `make nightly`: too slow for `make test` (see CONTRIBUTING.md)."""
