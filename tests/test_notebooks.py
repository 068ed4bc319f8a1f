"""The notebooks run from top to bottom."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted(pathlib.Path(__file__).parent.parent.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(path.parent.parent))
    notebook = nbformat.read(path, as_version=4)
    (tmp_path / "notebooks").mkdir()  # what it writes into ../runs is not the project's
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path / "notebooks"}}).execute()
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")
