"""Choosing settings on the validation part: a small search, its trials and the rule that chooses.

`space` says what is searched and which trials a seed gives, `search` runs them and remembers them
in a folder, `results` chooses one and shows all.

Written by hand, because sixteen quasi-random trials that all run to their end need no library of
adaptive search, which would bring a database and its migrations.
"""
