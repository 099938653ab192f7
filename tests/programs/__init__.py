"""Small programs of many kinds, each run on the CPU and on `remote` and compared. A program knows nothing of GT."""
