"""Files that are whole or absent."""

import os


def replace(path, write_file):
    """Writes a file by `write_file(path)` beside its old version and renames it, so that none is ever half written.

    Where writing fails, on a full disk say, the old version stays and nothing else is left.
    """
    partial = path.with_name(f"partial-{path.name}")  # the ending stays: it tells some writers the format
    try:
        write_file(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())  # so that the name never reaches the disk before the contents do
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
