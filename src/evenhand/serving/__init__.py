"""`evenhand serve`: trained runs behind HTTP, and the page that shows them side by side.

A request passes `connections` (how many, and how slow), `gate` (key, rate, size, log), `server`
(the routes), `batching` (the queue) and ends in a `ServedRun`.
"""
