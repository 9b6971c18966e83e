"""Install the locked packages and steptime into the running interpreter's environment. Standard library only.

    .venv/bin/python lib/locks/install.py [TORCH]

TORCH says which build of torch to take:
    auto   (default) what pip finds, unless that is the CUDA build of several GB; then PyTorch's own CPU index
    cpu    PyTorch's CPU index
    cuda   the package index's CUDA build
    PATH   a wheel, or a folder of wheels
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

LOCKS = Path(__file__).resolve().parent
LOCK = LOCKS / "cpu.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LARGE_MB = 300  # a CPU build for Linux is under 250 MB, the CUDA build over 500 MB before its nvidia packages
CUDA_SIZE = "about 2.7 GB to download, 5 GB on disk"


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def install(*arguments: str) -> bool:
    """Install exactly what is named; `compile_all` is faster than pip's own compiling."""
    return subprocess.run(pip("install", "-qq", "--no-compile", *arguments)).returncode == 0


def remove_half_installed() -> None:
    """Remove the metadata of packages whose installation was interrupted, so that pip does not count them as present.

    pip writes RECORD last.
    """
    for found in importlib.metadata.distributions():
        folder = getattr(found, "_path", None)
        if folder and folder.name.endswith(".dist-info") and not (folder / "RECORD").is_file():
            shutil.rmtree(folder)
    for left in Path(sysconfig.get_path("purelib")).glob("~*"):
        shutil.rmtree(left, ignore_errors=True)


def is_cuda_build(requirement: str) -> bool:
    """Whether pip would take a torch that brings the nvidia packages; decided without downloading it.

    Raises SystemExit when pip finds none.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = pip("install", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report), requirement)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = []
        for line in process.stdout or ():
            lines.append(line.rstrip())
            # An index that serves no metadata makes pip fetch the wheel to read them: stop it at the announced size.
            size = re.search(r"Downloading .*\.whl \(([\d.]+) ([MG])B\)", line)
            if size and (size[2] == "G" or float(size[1]) > LARGE_MB):
                process.kill()
                process.wait()
                return True
        if process.wait():
            sys.exit(f"install: pip finds no {requirement}: {lines[-1] if lines else 'no message'}")
        (entry,) = json.loads(report.read_text())["install"]
        needs = entry["metadata"].get("requires_dist", [])
        return sys.platform == "linux" and any(re.match(r"(nvidia|cuda)-", need) for need in needs)


def install_torch(choice: str, requirement: str) -> None:
    """Install torch in the build that `choice` names. Raises SystemExit, with the way out, when there is none."""
    if choice not in ("auto", "cpu", "cuda"):
        source = Path(choice)
        if source.is_file():
            done = install("--no-deps", str(source))
        elif source.is_dir():
            done = install("--no-deps", "--no-index", "--find-links", str(source), requirement)
        else:
            sys.exit(f"install: TORCH={choice}: neither auto, cpu, cuda nor a wheel or a folder of wheels")
        if not done:
            sys.exit(f"install: TORCH={choice}: could not be installed; see pip's message above")
    elif choice == "cuda":
        if not install("--constraint", str(LOCK), requirement):
            sys.exit("install: the CUDA build of torch could not be installed; see pip's message above")
    elif choice == "auto" and not is_cuda_build(requirement):
        if not install("--no-deps", requirement):
            sys.exit("install: torch could not be installed; see pip's message above")
    elif not install("--no-deps", "--timeout", "20", "--retries", "1", "--index-url", CPU_INDEX, f"{requirement}+cpu"):
        sys.exit(
            f"install: the package index's {requirement} is a CUDA build ({CUDA_SIZE}) and {CPU_INDEX} cannot be "
            "reached: take it with TORCH=cuda, or point TORCH=/path at a CPU wheel or a folder that holds one"
        )


def compile_all() -> None:
    """Byte-compile what is installed, on all cores: every stage and every child that is measured imports it."""
    # Some packages carry files of other Python versions as data, which do not compile: not our concern.
    compileall = [sys.executable, "-m", "compileall", "-q", "-j", "0", "-x", "/tests?/", sysconfig.get_path("purelib")]
    subprocess.run(compileall, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    choice = sys.argv[1] if len(sys.argv) > 1 else "auto"
    requirements = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    torch = next(line for line in requirements if line.startswith("torch=="))
    remove_half_installed()
    print(f"install: {len(requirements)} packages of lib/locks/cpu.txt; silent until done, minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        others = Path(folder) / "others.txt"
        others.write_text("\n".join(line for line in requirements if line != torch))
        if not install("--no-deps", "--requirement", str(others)):
            sys.exit("install: a package of lib/locks/cpu.txt could not be installed; see pip's message above")
    try:
        present = importlib.metadata.version("torch").partition("+")[0] == torch.partition("==")[2]
    except importlib.metadata.PackageNotFoundError:
        present = False
    if not present or choice != "auto":
        install_torch(choice, torch)
    if not install("--no-deps", "--no-build-isolation", "--editable", str(LOCKS.parent)):
        sys.exit("install: steptime itself could not be installed; see pip's message above")
    print("install: byte-compiling", flush=True)
    compile_all()


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
