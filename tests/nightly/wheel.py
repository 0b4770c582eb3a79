"""What users install: the docs' Python runs on the built wheel, in an environment of its own."""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from test_docs import PAGES, TEXTS, blocks_of

ROOT = Path(__file__).parents[2]
NEEDED = "[places]"  # what the pages use, beside pandas for the notebook
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(*words: str | Path, folder: Path, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run([str(word) for word in words], cwd=folder, env=CLEAN, **options)


def run_docs_on_wheel() -> int:
    """Builds the wheel of what is committed, installs it, runs every page; the number of failures.

    Nothing of the source tree is on the path, and no package is there that pip did not bring.
    """
    failed = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        bin_ = place / "venv" / ("Scripts" if os.name == "nt" else "bin")
        source = f"git -C {ROOT} archive HEAD | tar -x -C {place / 'source'}"
        (place / "source").mkdir()
        subprocess.run(source, shell=True, check=True)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
        run(*build, place, place / "source", folder=place, check=True)
        (wheel,) = place.glob("evenhand-*.whl")
        venv.create(place / "venv", with_pip=True)
        pinned = ROOT / "constraints.txt"
        pip = [bin_ / "pip", "install", "--quiet", "--constraint", pinned]
        run(*pip, f"{wheel}{NEEDED}", "pandas", folder=place, check=True)
        for number, page in enumerate(PAGES):
            script, home = place / f"page-{number}.py", place / f"home-{number}"
            home.mkdir()
            lines = ""
            for first_line, block in blocks_of(TEXTS[page], "python"):
                lines += "\n" * (first_line - 1 - lines.count("\n")) + block
            script.write_text(lines, "utf-8")
            if lines:
                done = run(bin_ / "python", script, folder=home, capture_output=True, text=True)
                print(f"{page.relative_to(ROOT)}: {'failed' if done.returncode else 'runs'}")
                if done.returncode:
                    failed.append(page)
                    print(done.stderr[-2000:])
        for words in (["--version"], ["doctor"]):
            failed += [words] * bool(run(bin_ / "evenhand", *words, folder=place).returncode)
    return len(failed)
