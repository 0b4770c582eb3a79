"""As for the tests of the package: fixed seeds, one thread."""

from tests.conftest import _fixed_seed

__all__ = ["_fixed_seed"]
