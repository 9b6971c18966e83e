"""README's generated blocks: from committed campaigns only, idempotent, never stale."""

import re
import shutil
from pathlib import Path

import pytest
from planted_report import plant

from steptime.core.errors import InputError
from steptime.report import readme
from steptime.report.readme import inputs_hash, update_readme

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("planted"))


@pytest.fixture
def checkout(planted: Path, tmp_path: Path) -> Path:
    root = tmp_path / "copy"
    shutil.copytree(planted, root)
    shutil.copy(ROOT / "README.md", root / "README.md")
    (root / "lib" / "locks").mkdir(parents=True)
    shutil.copy(ROOT / "lib" / "locks" / "system-packages.txt", root / "lib" / "locks")
    return root


def test_the_block_holds_answers_figure_and_table_of_the_committed_campaign(checkout: Path) -> None:
    update_readme(checkout)
    text = (checkout / "README.md").read_text()
    assert "1. On two cores torch takes less time" in text
    assert (
        "| network | batch | torch, ms | tensorflow, ms |\n| --- | --: | --: | --: |\n| mlp | 32 | 2.10 | 2.56 |"
        in text
    )
    assert "(data/headline.svg)" in text
    assert "Campaign `planted-laptop`: Planted CPU" in text
    figure = checkout / "data" / "figures" / "summary" / "headline.svg"
    assert (checkout / "data" / "headline.svg").read_bytes() == figure.read_bytes()


def test_a_second_run_writes_nothing(checkout: Path) -> None:
    update_readme(checkout)
    files = [checkout / "README.md", checkout / "data" / "headline.svg"]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    update_readme(checkout)
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before


def test_this_machines_campaign_alone_makes_no_headline(checkout: Path) -> None:
    update_readme(checkout)
    shutil.rmtree(checkout / "data" / "campaigns")
    update_readme(checkout)
    text = (checkout / "README.md").read_text()
    assert "No campaign is committed yet" in text
    assert "| mlp |" not in text
    assert not (checkout / "data" / "headline.svg").exists()


def test_measuring_here_again_changes_nothing(checkout: Path) -> None:
    update_readme(checkout)
    before = (checkout / "README.md").read_bytes()
    shutil.rmtree(checkout / "data" / "raw" / "local")
    update_readme(checkout)
    assert (checkout / "README.md").read_bytes() == before


def test_a_summary_of_other_campaigns_is_refused(checkout: Path) -> None:
    (checkout / "data" / "campaigns" / "planted-laptop").rename(checkout / "data" / "campaigns" / "other")
    with pytest.raises(InputError, match="made from planted-laptop, but data/campaigns holds other"):
        update_readme(checkout)


def test_a_lost_marker_is_one_line(checkout: Path) -> None:
    path = checkout / "README.md"
    path.write_text(path.read_text().replace("<!-- end of headline -->", ""))
    with pytest.raises(InputError, match="end of headline"):
        update_readme(checkout)


def test_the_packages_are_those_of_the_list(checkout: Path) -> None:
    (checkout / "lib" / "locks" / "system-packages.txt").write_text("# list\nplanted-tool   tool   to plant   test\n")
    update_readme(checkout)
    assert "| `planted-tool` | to plant | `make test` |" in (checkout / "README.md").read_text()
    (checkout / "lib" / "locks" / "system-packages.txt").write_text("planted-tool tool\n")
    with pytest.raises(InputError, match="planted-tool"):
        update_readme(checkout)


def test_the_committed_readme_is_not_stale() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.system_packages(ROOT) in text
    stamp = re.search(r"<!-- inputs ([0-9a-f]{12}) -->", text)
    if any(ROOT.glob("data/campaigns/*/runs.csv")):
        assert stamp is not None, "README has no headline though a campaign is committed: run `steptime site`"
        assert stamp[1] == inputs_hash(ROOT), "README was made from other inputs: run `steptime site`"
        assert (ROOT / readme.FIGURE).is_file()
    else:
        assert stamp is None
        assert "No campaign is committed yet" in text
