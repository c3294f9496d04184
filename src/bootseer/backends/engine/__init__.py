"""Which replica a part is read from, when, and when again elsewhere."""
