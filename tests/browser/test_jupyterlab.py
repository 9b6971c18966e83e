"""Every notebook opened, run by hand with its defaults and saved in JupyterLab: no error, and nothing changes but its

own outputs and the scratch folder.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["chromium"]  # the browser fixture

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "planted"
LONGEST_NOTEBOOK_S = 420
PUBLISHED = {"measure": "local"}
"""Where the runner puts a notebook's raw folder, where that is not its own name."""

RUN_AND_SAVE = """
const [path, done] = arguments;
(async () => {
  const app = window.jupyterapp;
  await app.restored;
  const panel = await app.commands.execute("docmanager:open", {path, factory: "Notebook"});
  await panel.context.ready;
  await panel.sessionContext.ready;
  app.shell.activateById(panel.id);
  await app.commands.execute("notebook:run-all-cells");
  const cells = [...panel.content.widgets].filter((cell) => cell.model.type === "code");
  const outputs = cells.flatMap((cell) => cell.model.outputs.toJSON());
  await panel.context.save();
  const saved = {dirty: panel.context.model.dirty, status: panel.sessionContext.session.kernel.status};
  await panel.sessionContext.shutdown();
  return {outputs, saved, waiting: cells.filter((cell) => cell.model.executionCount === null).length};
})().then(done, (error) => done({error: String(error && error.stack || error)}));
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree's own files, committed in a repository of their own."""
    copy = tmp_path_factory.mktemp("lab") / "checkout"
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    _steptime(copy, "notebooks", "sync")
    _git(copy, "init", "-q")
    _git(copy, "add", "-A")
    _git(copy, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-q", "-m", "copy")
    return copy


@pytest.fixture(scope="module")
def lab(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on a free port of the loopback, with settings of its own; its address."""
    pytest.importorskip("jupyterlab")
    home = tmp_path_factory.mktemp("home")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {name: str(home / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={TOKEN}", "--LabApp.extension_manager=readonly"]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=checkout, env=os.environ | folders, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/api/status?token={TOKEN}", server, home / "log")
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def test_every_notebook_runs_with_its_defaults_and_saves_without_a_change_in_git(
    browser: object, lab: str, checkout: Path
) -> None:
    texts = {path: path.read_bytes() for path in checkout.glob("notebooks/text/*.py")}
    names = sorted(path.name for path in checkout.glob("notebooks/*.ipynb"))
    assert [name.removesuffix(".ipynb") for name in names] == sorted(path.stem for path in texts)
    browser.set_script_timeout(LONGEST_NOTEBOOK_S)
    browser.get(f"{lab}/lab?token={TOKEN}")
    _until(browser, "return !!(window.jupyterapp && window.jupyterapp.commands)")
    kinds: set[str] = set()
    for name in names:
        before = _written(checkout)
        result = browser.execute_async_script(RUN_AND_SAVE, f"notebooks/{name}")
        assert "error" not in result, f"{name}: {result['error']}"
        errors = [output for output in result["outputs"] if output["output_type"] == "error"]
        assert errors == [], name
        assert result["waiting"] == 0, name
        assert result["saved"]["dirty"] is False, name
        assert result["saved"]["status"] in ("idle", "busy"), name
        saved = {checkout / "notebooks" / name, checkout / "notebooks/text" / f"{Path(name).stem}.py"}  # its pair
        assert {path for path, _ in before ^ _written(checkout)} <= saved, name
        kinds |= {kind for output in result["outputs"] for kind in output.get("data", {})}
        _publish(checkout, name.removesuffix(".ipynb").partition("_")[2])

    assert "image/svg+xml" in kinds

    changed = {line[3:] for line in _git(checkout, "status", "--porcelain").splitlines()}
    assert changed <= {f"notebooks/{name}" for name in names}
    assert changed, "no output was saved"
    assert {path: path.read_bytes() for path in checkout.glob("notebooks/text/*.py")} == texts

    _steptime(checkout, "notebooks", "strip")
    assert _git(checkout, "status", "--porcelain") == ""


def _written(checkout: Path) -> set[tuple[Path, int]]:
    """Every file outside the scratch folder and the caches, with the time of its last change."""
    ignored = {".scratch", "__pycache__", ".git", ".ipynb_checkpoints", ".virtual_documents"}
    files = [path for path in checkout.rglob("*") if path.is_file() and not ignored & set(path.parts)]
    return {(path, path.stat().st_mtime_ns) for path in files}


def _publish(checkout: Path, name: str) -> None:
    """Hand what the notebook wrote to the next one, as the pipeline's runner does."""
    scratch, data = checkout / "data" / ".scratch" / name, checkout / "data"
    places = {scratch / "raw": data / "raw" / PUBLISHED.get(name, name), scratch / "derived": data / "derived" / name}
    for source, target in places.items():
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)


def _steptime(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-c", "from steptime.cli import main; main()", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=folder, text=True)


def _wait_for(address: str, server: subprocess.Popen, log: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not start: {log.read_text()[-2000:]}")


def _until(browser: object, script: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not browser.execute_script(script):
        assert time.monotonic() < end, f"never true: {script}"
        time.sleep(0.2)
