"""Compiled fast paths behind the functions of the core; each is tested against a slow reference."""
