"""Fast paths behind the functions of the core. Each has a slow twin, its oracle in the tests."""
