"""`python -m evenhand`, where the package is not installed."""

from evenhand.cli import main

raise SystemExit(main())
