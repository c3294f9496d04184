"""What earlier starts touched: traces, the profiles they merge to, and what these say of files and processes."""
