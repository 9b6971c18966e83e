"""The system packages that the study needs: one list, lib/locks/system-packages.txt."""

import glob
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from steptime.core.files import read_text


@dataclass(frozen=True)
class SystemPackage:
    """A Debian package. `brings`: a program of its, or the path of another file of its, with wildcards.

    `needed_by`: "study", "test" (and CI) or "vintage" (making the frameworks' own environments).
    """

    name: str
    brings: str
    purpose: str
    needed_by: str

    @property
    def found(self) -> str | None:
        """Where what it brings is, or None when the package is not there."""
        if self.brings.startswith("/"):
            return next(iter(sorted(glob.glob(self.brings))), None)
        return shutil.which(self.brings)


def system_packages(root: Path) -> list[SystemPackage]:
    """The list's rows. `root`: the project's folder."""
    rows = []
    for line in read_text(root / "lib/locks/system-packages.txt").splitlines():
        if line and not line.startswith("#"):
            name, brings, rest = line.split(maxsplit=2)
            purpose, needed_by = rest.rsplit(maxsplit=1)
            rows.append(SystemPackage(name, brings, purpose, needed_by))
    return rows


def not_there(root: Path, names: Iterable[str]) -> list[str]:
    """Those of the list's packages `names` that this machine lacks."""
    known = {package.name: package for package in system_packages(root)}
    return [name for name in names if known[name].found is None]


def install_command(names: Iterable[str]) -> str:
    """The one command that installs these packages."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    return f"{sudo}apt-get install -y {' '.join(names)}"
