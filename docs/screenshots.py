"""Renews the pictures of pages: `sphinx-build docs site && python docs/screenshots.py site`.

Needs Chromium and Pillow. The pages of a plan and a run are those of docs/howto/pictures.md.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests"))
import browser  # noqa: E402

FLAGS = "--headless --disable-gpu --no-sandbox --hide-scrollbars --virtual-time-budget=5000".split()


ALL = [(1280, "light"), (1280, "dark"), (420, "light"), (420, "dark")]


def shoot(page: Path, name: str, views: list[tuple[int, str]], height: int, folder: str) -> None:
    """Writes docs/images/NAME-WIDTH-THEME.png. Windows have 500 pixels or more, frames any."""
    frame, shot = Path(folder, "frame.html"), Path(folder, "shot.png")
    for width, theme in views:
        style = f"position: fixed; inset: 0; border: 0; width: {width}px; height: {height}px"
        frame.write_text(f'<iframe src="{page.resolve().as_uri()}" style="{style}"></iframe>')
        flags = [*FLAGS, f"--window-size=1280,{height}", f"--screenshot={shot}"]
        flags += ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
        command = [browser.executable(), *flags, frame.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        image = Image.open(shot).convert("RGB").crop((0, 0, width, height))
        image = image.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        image.save(DOCS / "images" / f"{name}-{width}-{theme}.png", optimize=True)


with tempfile.TemporaryDirectory() as folder:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "howto/pictures.md").read_text(), re.DOTALL)
    program = "\n".join([*blocks[:3], blocks[2]])  # the second run has compiled bodies
    Path(folder, "fit.py").write_text(program)
    subprocess.run([sys.executable, "fit.py"], cwd=folder, check=True)
    shoot(Path(folder, "plan.html"), "plan", [ALL[0], ALL[3]], 1200, folder)
    shoot(Path(folder, "run.html"), "run", [ALL[0], ALL[1], ALL[3]], 1200, folder)
    for name in ("index", "tutorial", "benchmarks-suite"):
        shoot(Path(sys.argv[1], f"{name}.html"), f"site/{name}", ALL, 1000, folder)
