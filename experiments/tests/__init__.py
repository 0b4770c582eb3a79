"""Tests of the experiments; `make test` runs them."""
