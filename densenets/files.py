"""Files that are whole or absent."""

import os


def replace(path, write_file):
    """Writes a file by `write_file(path)` beside its old version and renames it, so that none is ever half written."""
    partial = path.with_name(f"partial-{path.name}")  # the ending stays: it tells some writers the format
    write_file(partial)
    os.replace(partial, path)
