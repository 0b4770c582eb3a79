"""`python -m evenhand`, where the package is not installed."""

from evenhand.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
