"""The command ``data``: token shards and corpora."""
