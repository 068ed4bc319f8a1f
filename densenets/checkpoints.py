"""The state of a training run in one file, so that it can go on where it was."""

import json
import zipfile

import numpy as np

from densenets import files

PROGRESS = "progress"


class CheckpointError(RuntimeError):
    """A checkpoint that does not belong to the network, or is broken."""


def save(path, variables, progress):
    """Writes the values of `variables` and `progress`, which JSON must be able to hold, into one `.npz` file.

    It is written beside the old one and renamed: whenever the process is killed, the file is whole.
    """
    # By number: names of layers count up within a process, and another process may have built other networks before.
    arrays = {str(number): variable.numpy() for number, variable in enumerate(variables)}
    files.replace(path, lambda partial: np.savez(partial, **{PROGRESS: json.dumps(progress)}, **arrays))


def restore(path, variables):
    """Sets `variables` to the values in a file that `save` wrote, and returns its progress; `None` where there is no file.

    Raises:
        CheckpointError: for a file that is broken or of another network; the variables are then as they were.
    """
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise zipfile.BadZipFile("a checksum is wrong")
        with np.load(path) as archive:
            arrays = dict(archive)
        progress = json.loads(str(arrays.pop(PROGRESS)))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is broken ({type(error).__name__}: {error}). Remove it to train from the start."
        ) from error
    expected = {str(number): tuple(variable.shape) for number, variable in enumerate(variables)}
    found = {name: array.shape for name, array in arrays.items()}
    if expected != found:
        different = [
            f"{expected.get(k)} expected, {found.get(k)} found" for k in expected | found if expected.get(k) != found.get(k)
        ]
        raise CheckpointError(f"{path} is of another network: {len(different)} shapes differ, such as {different[0]}.")
    for number, variable in enumerate(variables):
        variable.assign(arrays[str(number)])
    return progress
