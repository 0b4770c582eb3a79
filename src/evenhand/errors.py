"""Errors that a user can fix, and the end of work that a user has stopped."""


class UserError(Exception):
    """States where, what is wrong and what to do; the command line prints it and exits with 2."""


class StoppedError(Exception):
    """Work was stopped by the user; states how to continue, and the exit code is 130."""
