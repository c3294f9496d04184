"""The processes that serve a lazy tree (supervisor, FUSE server, fetcher), and what a program does with them."""
