"""Choosing settings on the validation part.

space        what is varied, and the trials that a seed plans
search       `evenhand tune`: runs the trials and chooses one by a rule
time_budget  `evenhand train --minutes`: one change at a time while there is time

Sixteen quasi-random trials that all run to their end need no library of adaptive search, which
would bring a database and its migrations.
"""
