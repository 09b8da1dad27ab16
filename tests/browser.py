"""Pages in Chromium without a screen: `look` shows one, and returns what a script finds in it."""

import functools
import html
import json
import os
import re
import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

SCRIPT = """
<script>addEventListener("load", () => setTimeout(async () => {
  let found;
  try { found = await (async () => { %s })(); } catch (error) { found = String(error); }
  document.documentElement.textContent = "<found>" + JSON.stringify(found ?? null) + "</found>";
}, 100))</script>"""


@functools.cache
def executable() -> str | None:
    """Chromium, or None; the variable CHROMIUM may name it."""
    named = os.environ.get("CHROMIUM")
    found = (shutil.which(name) for name in ((named,) if named else NAMES))
    return next((path for path in found if path), None)


def missing() -> str:
    """What the tests lack to open pages; empty if nothing."""
    return "" if executable() else "Chromium (apt-get install chromium)"


def look(page, script, width=1280, dark=False, screenshot=None):
    """What the body of an asynchronous function finds in a page, and what the console shows.

    Args:
      page: as HTML.
      script: the body.
      width: of the window, 500 or more.
      dark: whether the user prefers dark pages.
      screenshot: a file for a picture of the page without the script.
    """
    flags = ["--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
             "--enable-logging=stderr", f"--window-size={width},900"]  # fmt: skip
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []

    def run(text, *more):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, "page.html")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            command = [executable(), *flags, f"--user-data-dir={folder}/profile", *more]
            done = subprocess.run(
                [*command, f"file://{path}"], capture_output=True, text=True, timeout=60, check=True
            )
        return done.stdout, re.findall(r":CONSOLE.*", done.stderr)

    if screenshot is not None:
        run(page, f"--screenshot={screenshot}")
    out, console = run(page + SCRIPT % script, "--virtual-time-budget=5000", "--dump-dom")
    found = re.search("<found>(.*)</found>", html.unescape(out), re.DOTALL)
    assert found, out[-2000:]
    return json.loads(found[1]), console
