"""The peaks that go with a campaign: which are taken, and whose are refused."""

from pathlib import Path

import planted_campaign as planted
import pytest

from steptime.core.campaign import write_campaign
from steptime.core.errors import InputError
from steptime.core.files import write_json
from steptime.core.machine import Machine, read_machine
from steptime.measure import add_campaign
from steptime.model.choosing import machine_of


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    write_campaign(planted.campaign("local"), tmp_path / "local")
    return tmp_path / "local"


def own(root: Path, **changes: object) -> None:
    write_json(root / "data/raw/machine/machine.json", planted.MACHINE | changes)


def test_the_peaks_that_the_machine_measured_go_with_its_campaign(recorded: Path, tmp_path: Path) -> None:
    own(tmp_path)
    target = add_campaign(recorded, "lab-1", tmp_path)
    assert read_machine(target / "machine.json") == Machine(**planted.MACHINE | {"name": "lab-1"})
    assert machine_of(target) == read_machine(target / "machine.json")


def test_another_machine_s_campaign_gets_no_peaks_of_this_one(recorded: Path, tmp_path: Path) -> None:
    own(tmp_path, device="Another CPU")
    target = add_campaign(recorded, "lab-1", tmp_path)
    assert machine_of(target) is None


def test_peaks_beside_the_campaign_come_first_and_must_be_its_machine_s(recorded: Path, tmp_path: Path) -> None:
    own(tmp_path, peak_flops_per_s=1.0)
    write_json(recorded / "machine.json", planted.MACHINE)
    assert machine_of(add_campaign(recorded, "lab-1", tmp_path)).peak_flops_per_s == 6e10
    write_json(recorded / "machine.json", planted.MACHINE | {"memory_bytes": 1})
    with pytest.raises(InputError, match="is not the machine of the runs"):
        add_campaign(recorded, "lab-2", tmp_path)
    assert not (tmp_path / "data/campaigns/lab-2").exists()


def test_peaks_that_name_a_path_are_refused(recorded: Path, tmp_path: Path) -> None:
    own(tmp_path, source="measured by /opt/tool")
    with pytest.raises(InputError, match="absolute path"):
        add_campaign(recorded, "lab-1", tmp_path)
    assert not (tmp_path / "data/campaigns/lab-1").exists()
