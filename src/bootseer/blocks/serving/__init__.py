"""The processes that serve a lazy tree: holder, front (keeper or FUSE) and fetcher, and what joins them."""
