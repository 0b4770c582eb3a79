"""Choosing settings on the validation part: trials, and the rule that picks one of them.

space    what is varied, and the trials that a seed plans
search   runs them: `evenhand tune`, and `evenhand train --minutes`
results  the rule, and the table and page that show the outcome

Sixteen quasi-random trials that all run to their end need no library of adaptive search, which
would bring a database and its migrations.
"""
