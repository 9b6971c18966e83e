"""The profiled step is the step: the same training, with its layers timed inside."""

from pathlib import Path

import profiled
import pytest

from steptime.frameworks import Child, installed_version


@pytest.mark.parametrize("framework", ["torch", "torch_channels_last", "tensorflow"])
def test_a_profiled_step_trains_as_a_plain_one_and_names_all_layers(framework: str, tmp_path: Path) -> None:
    assert installed_version(framework)
    with Child(framework) as child:
        profiled.check(child, tmp_path)
