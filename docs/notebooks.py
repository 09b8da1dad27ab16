"""Runs the notebooks and stores them with their outputs: `python docs/notebooks.py [NAME ...]`."""

import sys
import sysconfig
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"


def is_shown(output: nbformat.NotebookNode) -> bool:
    """Logs, progress bars and scripts of other packages are left out."""
    if output.output_type == "display_data":
        return "image/png" in output.data or "text/html" in output.data
    return output.get("name") != "stderr"


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if is_shown(output)]
        text = nbformat.writes(notebook)
        for start in (folder, sysconfig.get_path("purelib")):
            text = text.replace(f"{start}/", "")
    path.write_text(text + "\n", encoding="utf-8")


for name in sys.argv[1:] or ("bayes", "climate", "federated", "influence"):
    run(FOLDER / f"{name}.ipynb")
