"""What a user can mend - a file, a setting, a command - and what a user asked for: to stop."""


class UserError(Exception):
    """Says where, what is wrong and what to do. The command line prints it and exits with 2."""


class StoppedError(Exception):
    """Work ended early because it was asked to; says how to go on, and the exit code is 130."""
