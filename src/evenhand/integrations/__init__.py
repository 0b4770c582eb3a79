"""Evenhand inside other trainers; each module needs the extra that its docstring names."""
