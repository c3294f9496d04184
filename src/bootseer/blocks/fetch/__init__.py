"""How missing blocks come: sources, the queue of demand, hot stream and background, the threads that fetch."""
