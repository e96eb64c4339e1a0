"""Documents out of files of raw text: JSON lines, Parquet, plain text, WARC and WET."""
