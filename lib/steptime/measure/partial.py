"""The partial folder: every finished run of a campaign under way, so that an interruption costs only the run it hits.

One folder a run, RUN_ID.KEY, made whole by a rename. The key is a hash of all that decides what the run's times mean;
`complete.json` is there when the campaign went into its outs, and says with which cases.
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steptime.core.campaign import read_campaign, write_campaign
from steptime.core.files import read_json, write_json
from steptime.measure.fingerprint import short_hash
from steptime.measure.plan import Case, Plan
from steptime.measure.provenance import code_facts
from steptime.measure.run import Run, campaign_of, runs_of


def case_key(case: Case, plan: Plan, fingerprint: str) -> str:
    """The same for two runs of a case that may stand side by side: same case, settings, code, framework, machine."""
    deciding = {"warmups", "samples", "layer_samples", "phase_samples", "profile_rounds", "seed", "memory_limit_gib"}
    settings = plan.model_dump(include=deciding)
    return short_hash([asdict(case), settings, fingerprint, code_facts()["code_hash"]])


class Partial:
    """The finished runs of the cases in `keys` (case_id -> key) under `folder`; runs of other keys are deleted.

    A folder left complete by the very same plan and keys is emptied: measuring again was asked for.
    """

    def __init__(self, folder: Path, plan: Plan, keys: Mapping[str, str], *, fresh: bool) -> None:
        self._folder, self._keys = Path(folder), dict(keys)
        self._marker = self._folder / "complete.json"
        self._state: dict[str, Any] = {"plan": plan.model_dump(mode="json"), "keys": self._keys}
        self._folder.mkdir(parents=True, exist_ok=True)
        anew = fresh or (self._marker.is_file() and read_json(self._marker) == self._state)
        for path in self._folder.iterdir():
            if path != self._marker and (anew or path.name.rpartition(".")[2] not in self._keys.values()):
                _delete(path)
        # last, so that an interruption of the above does not pass for a campaign under way
        self._marker.unlink(missing_ok=True)

    def kept(self) -> dict[str, Run]:
        """run_id -> run, for every finished run."""
        found = [runs_of(read_campaign(folder))[0] for folder in sorted(self._folder.iterdir())]
        return {run.row["run_id"]: run for run in found}

    def save(self, run: Run) -> None:
        """Keep a finished run: written aside, then renamed."""
        aside = Path(tempfile.mkdtemp(dir=self._folder, prefix=".run."))
        write_campaign(campaign_of([run], ""), aside)
        aside.rename(self._folder / f"{run.row['run_id']}.{self._keys[run.row['case_id']]}")

    def mark_complete(self) -> None:
        write_json(self._marker, self._state)


def _delete(path: Path) -> None:
    """Renamed first: an interruption must not leave half a run under a run's name."""
    doomed = path.rename(path.with_name(f".{path.name}.deleted"))
    shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
