"""Which replica a piece is read from, when, and when again elsewhere: the scheduler of striped reads."""
