"""Files on a folder, HDFS, or whatever fsspec reaches, behind one interface: below stores and striped stores."""
