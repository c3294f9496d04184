"""Lazy files: immutable blobs cut in blocks that are fetched, verified and cached on first use.

The package knows nothing of images or environments. ``tree`` is its door: publish a directory tree once, mount it
anywhere while its bytes still arrive. Formats: ``docs/internals/blockmap.md`` and ``docs/internals/trace.md``;
threads and locks: ``docs/internals/blocks-concurrency.md``."""
