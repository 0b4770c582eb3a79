"""Choosing settings on the validation part.

space    what is varied, and the trials that a seed plans
search   `evenhand tune`: runs the trials
results  the rule that chooses one, and the table and page that show them
minutes  `evenhand train --minutes`: one change at a time while there is time

Sixteen quasi-random trials that all run to their end need no library of adaptive search, which
would bring a database and its migrations.
"""
