"""Opens report pages in headless Chromium and checks that they fit, are not empty and report no error.

Usage: python3 scripts/check_pages.py PAGE.html [PAGE.html ...]. Each page is opened on a phone (390
pixels wide) and on a desk (1100), light and dark. Where Chromium is missing, root installs it from
Debian's packages. Screenshots go to the folder $BLR_PAGES, if it is set. Exit code 1: a page failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

WIDTHS, HEIGHT = (390, 1100), 2400
LEAST = 20_000  # bytes of a screenshot of a page that is not empty
# Headless Chromium has no window as narrow as a phone: the page lies in a frame, whose width is measured
FRAME = """<!DOCTYPE html><body style="margin:0"><iframe id="f" src="{page}" scrolling="no"
style="border:0;width:{width}px;height:{height}px"></iframe><script>
onload = () => {{ const d = document.getElementById("f").contentDocument.documentElement;
document.body.dataset.found = d.scrollWidth + " " + d.innerText.length }}</script></body>"""


def chromium() -> str:
    """Its program, installed if need be."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], check=True
        )
        found = shutil.which("chromium")
    assert found is not None
    return found


def opened(page: Path, width: int, dark: bool, *options: str) -> subprocess.CompletedProcess[str]:
    """What Chromium prints of a page in a frame of that width."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(FRAME.format(page=page.resolve().as_uri(), width=width, height=HEIGHT))
        program = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        program += [
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            f"--window-size={max(width, 500)},{HEIGHT}",
        ]
        program += [*["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] * dark, *options]
        return subprocess.run(
            [*program, frame.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )


def faults(page: Path, width: int, dark: bool) -> Iterator[str]:
    """What is wrong with a page, in words."""
    done = opened(page, width, dark, "--dump-dom")
    found = re.search(r'data-found="(\d+) (\d+)"', done.stdout)
    if found is None:
        yield "it was not loaded"
        return
    if int(found[1]) > width:
        yield f"it is {found[1]} pixels wide"
    if int(found[2]) < 100:
        yield f"it shows {found[2]} characters"
    yield from (line for line in done.stderr.splitlines() if "CONSOLE" in line)
    with tempfile.TemporaryDirectory() as folder:
        name = f"{page.parent.name}-{width}-{'dark' if dark else 'light'}.png"
        picture = Path(os.environ.get("BLR_PAGES", folder)) / name
        opened(page, width, dark, f"--screenshot={picture}")
        if picture.stat().st_size < LEAST:
            yield f"its screenshot has {picture.stat().st_size:,} bytes, as an empty page"


def main() -> int:
    wrong = 0
    for page, width, dark in product(map(Path, sys.argv[1:]), WIDTHS, (False, True)):
        said = list(faults(page, width, dark))
        wrong += len(said)
        print(f"{page}, {width} pixels, {'dark' if dark else 'light'}: {'; '.join(said) or 'right'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
