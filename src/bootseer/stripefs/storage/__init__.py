"""Where stripes lie: a folder, HDFS, or any store of fsspec, behind one interface."""
