"""What Spark needs to run here: PySpark, and Java for a session of one's own.

Owns: finding them, and saying what to do when they are not there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import metadata, util
from pathlib import Path

from headgate import NotFoundError

PYSPARK_LEAST = (4, 2)
JAVA_LEAST = 17
_ANSWER_SECONDS = 60.0


@cache
def require_pyspark() -> None:
    """Refuse, with what to install, unless a PySpark that is new enough is there.

    Raises:
        NotFoundError: there is none, or an older one.
    """
    wanted = ".".join(map(str, PYSPARK_LEAST))
    if util.find_spec("pyspark") is None:
        raise NotFoundError("PySpark is not installed", hint="pip install 'headgate[spark]'")
    try:
        version = metadata.version("pyspark")
    except metadata.PackageNotFoundError:  # a Spark distribution on the path, not a package
        from pyspark import __version__ as version
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < PYSPARK_LEAST:
        raise NotFoundError(f"PySpark {version} is installed, and {wanted} is the least", hint="pip install -U 'headgate[spark]'")


def find_java() -> Path | None:
    """The home of a Java that Spark can use: JAVA_HOME, else what is on the path, else what is in the usual places."""
    return next((home for home in _java_homes() if java_version(home) >= JAVA_LEAST), None)


def require_java() -> Path:
    """Raises NotFoundError, with what to install."""
    home = find_java()
    if home is None:
        raise NotFoundError(
            f"Spark needs Java {JAVA_LEAST} or later, and none was found",
            hint="install one (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME",
        )
    return home


def _java_homes() -> Iterator[Path]:
    if told := os.environ.get("JAVA_HOME"):
        yield Path(told)
    if found := shutil.which("java"):
        yield Path(found).resolve().parent.parent
    for folder in ("/usr/lib/jvm", "/Library/Java/JavaVirtualMachines", "/opt/java"):
        for home in sorted(Path(folder).glob("*"), reverse=True):
            yield from (home, home / "Contents" / "Home")


@cache
def java_version(home: Path) -> int:
    """The first number of a Java's version; 0: there is none."""
    program = home / "bin" / "java"
    if not program.is_file():
        return 0
    try:
        said = subprocess.run([str(program), "-version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', said)
    return int(found.group(1)) if found else 0
