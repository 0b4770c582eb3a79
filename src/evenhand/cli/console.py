"""The console of all verbs, imported when there is something to print."""

from evenhand.progress import PipedConsole

# Names of labels and folders are printed as they are: "[b]" and ":smile:" mean nothing special.
console = PipedConsole(markup=False, emoji=False, highlight=False, soft_wrap=True)
if not console.is_terminal:  # a file or a pipe has no width of its own: tables stay whole
    console.width = 132
