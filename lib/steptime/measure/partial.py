"""The partial folder: every finished run of a campaign under way, so that an interruption costs only the run it hits.

One folder a run, RUN_ID.KEY, made whole by a rename. The key is a hash of all that decides what the run's times mean;
`complete.json` is there when the campaign went into its outs, and says with which cases.
"""

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steptime.core.campaign import read_campaign, write_campaign
from steptime.core.errors import InputError
from steptime.core.files import read_json, write_json
from steptime.measure.fingerprint import short_hash
from steptime.measure.plan import Case, Plan
from steptime.measure.provenance import code_facts
from steptime.measure.run import Run, campaign_of, runs_of

_OURS = re.compile(
    # a run; one that was being written or deleted; complete.json, and its text before its rename
    r"[^.].*\.[0-9a-f]{16}|\.run\..+|\..+\.deleted|complete\.json|\.complete\.json\..+\.part"
)


def case_key(case: Case, plan: Plan, fingerprint: str) -> str:
    """The same for two runs of a case that may stand side by side: same case, settings, code, framework, machine."""
    deciding = {"warmups", "samples", "layer_samples", "phase_samples", "profile_rounds", "seed", "memory_limit_gib"}
    settings = plan.model_dump(include=deciding)
    return short_hash([asdict(case), settings, fingerprint, code_facts()["code_hash"]])


class Partial:
    """The finished runs of the cases in `keys` (case_id -> key) under `folder`; runs of other keys are deleted.

    A folder left complete by the very same plan and keys is emptied: measuring again was asked for. One that holds what
    is none of ours is refused with an InputError: it may be somebody's, and what is in it would be deleted.
    """

    def __init__(self, folder: Path, plan: Plan, keys: Mapping[str, str], *, fresh: bool) -> None:
        self._folder, self._keys = Path(folder), dict(keys)
        self._marker = self._folder / "complete.json"
        self._state: dict[str, Any] = {"plan": plan.model_dump(mode="json"), "keys": self._keys}
        self._make()
        anew = fresh or (self._marker.is_file() and read_json(self._marker) == self._state)
        for path in self._folder.iterdir():
            if path != self._marker and (anew or path.name.rpartition(".")[2] not in self._keys.values()):
                _delete(path)
        # last, so that an interruption of the above does not pass for a campaign under way
        self._marker.unlink(missing_ok=True)

    def _make(self) -> None:
        if self._folder.exists() and not self._folder.is_dir():
            raise InputError(f"{self._folder}: is a file where finished runs are kept; remove it")
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.iterdir()):
            if not _OURS.fullmatch(path.name):
                raise InputError(
                    f"{path}: is no run of an interrupted measurement, which this folder is for; move it elsewhere, or "
                    "measure into another --out"
                )

    def kept(self) -> dict[str, Run]:
        """run_id -> run, for every finished run. Raises InputError for one that was changed."""
        found = [self._run(folder) for folder in sorted(self._folder.iterdir())]
        return {run.row["run_id"]: run for run in found}

    def _run(self, folder: Path) -> Run:
        try:
            campaign = read_campaign(folder)
        except InputError as error:
            fault = str(error).partition("; ")[0]
            raise InputError(f"{fault}; remove {folder} and this run is measured again") from None
        run = runs_of(campaign)[0]
        if len(campaign.runs) != 1 or folder.name != self._name(run):
            raise InputError(f"{folder}: is not the run that its name says; remove it and that is measured again")
        return run

    def _name(self, run: Run) -> str:
        return f"{run.row['run_id']}.{self._keys.get(run.row['case_id'])}"

    def save(self, run: Run) -> None:
        """Keep a finished run: written aside, then renamed."""
        aside = Path(tempfile.mkdtemp(dir=self._folder, prefix=".run."))
        write_campaign(campaign_of([run], ""), aside)
        aside.rename(self._folder / self._name(run))

    def mark_complete(self) -> None:
        write_json(self._marker, self._state)


def _delete(path: Path) -> None:
    """Renamed first: an interruption must not leave half a run under a run's name."""
    doomed = path.rename(path.with_name(f".{path.name}.deleted"))
    shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
