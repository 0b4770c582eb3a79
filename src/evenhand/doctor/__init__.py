"""`evenhand doctor`: what is installed, what is usable and what is slow on this machine."""
