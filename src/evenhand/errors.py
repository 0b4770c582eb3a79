"""The one exception for what a user can mend: a file, a setting, a command."""


class UserError(Exception):
    """Says where, what is wrong and what to do. The command line prints it and exits with 2."""
