"""Making a local campaign part of the study: checked, scrubbed of names, copied under data/campaigns/."""

import os
import pwd
import re
import shutil
import socket
from pathlib import Path

import pandas as pd

from steptime import frameworks, networks
from steptime.core.campaign import Campaign, read_campaign, write_campaign
from steptime.core.errors import InputError
from steptime.core.files import json_text, read_json
from steptime.core.machine import Machine, read_machine
from steptime.core.parity import read_parity
from steptime.core.workers import files_of_workers, is_of_workers, read_workers
from steptime.measure.plan import read_plan_file
from steptime.measure.provenance import ABSOLUTE_PATH

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,60}")


def add_campaign(source: Path, name: str, root: Path) -> Path:
    """Copy the campaign in `source` to data/campaigns/NAME under `root`; the new folder.

    Its plan goes with it, if there is one, so that it can be measured again, and its parity, and its machine's peaks as
    machine.json, where they are known: from `source`, else what `root` measured if that is the same processor and
    memory. One of many workers brings the files of `core.workers`. All of it is written, or none. Raises InputError
    when it is not valid, has a network that is not known (see `check_names`), names this host, its user, their home or
    an absolute path, or when the name is taken or not of lower-case letters, digits and hyphens (61 at most).
    """
    if not NAME.fullmatch(name):
        raise InputError(f"campaign name {name!r}: use lower-case letters, digits and hyphens, a letter or digit first")
    if name == "local":
        raise InputError("campaign name 'local': is this machine's own measurement; choose another name")
    target = Path(root) / "data" / "campaigns" / name
    if target.exists():
        raise InputError(f"{target}: exists already; choose another name or remove it first")
    campaign = read_campaign(source)
    check_names(campaign, Path(source))
    _refuse_private(campaign.runs, Path(source) / "runs.csv")
    _refuse_private(campaign.samples, Path(source) / "samples.csv")
    machine = _machine(campaign, Path(source), Path(root))
    parity = read_parity(source)
    beside = _of_workers(Path(source)) if is_of_workers(source) else _plan(Path(source))
    if len(parity):
        beside["parity.csv"] = (Path(source) / "parity.csv").read_text()
    if machine is not None:
        beside["machine.json"] = json_text(machine.model_copy(update={"name": name}).model_dump())
    aside = Path(root) / "data/.partial/added" / name
    shutil.rmtree(aside, ignore_errors=True)
    write_campaign(Campaign(name, campaign.runs, campaign.samples), aside, beside)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside.rename(target)
    return target


def check_names(campaign: Campaign, folder: Path) -> list[str]:
    """What this version does not know by its name, a line each, among the campaign's frameworks and networks.

    An unknown framework is told and not refused: the project may have dropped it since, or the campaign be somebody
    else's; its times can be compared all the same, and only its name may be a slip. An unknown network is refused with
    an InputError: without its description nothing but its times can be said (FLOPs, bytes, layers, what fits), and the
    studies ask for it. The mend is its entry in networks/zoo.py.
    """
    runs, path = campaign.runs, Path(folder) / "runs.csv"
    unknown = runs.index[~runs["network"].isin(networks.NAMES)]
    if len(unknown):
        raise InputError(
            f"{path}: line {unknown[0] + 2}: network = {runs['network'][unknown[0]]!r}: is not described here; correct "
            f"it, or add the network to lib/steptime/networks/zoo.py; known: {', '.join(networks.NAMES)}"
        )
    others = runs[~runs["framework"].isin(list(frameworks.SETTINGS))].drop_duplicates("framework")
    return [
        f"{path}: line {row + 2}: framework = {name!r}: is none of this version's; correct it if it is a slip; known: "
        f"{', '.join(frameworks.SETTINGS)}"
        for row, name in others["framework"].items()
    ]


def _plan(source: Path) -> dict[str, str]:
    path = source / "plan.json"
    return {path.name: json_text(read_plan_file(path).model_dump(mode="json"))} if path.is_file() else {}


def _of_workers(source: Path) -> dict[str, str]:
    """What a campaign of many workers has beside its runs and samples, checked; its plan is of another kind."""
    found = read_workers(source)
    _refuse_private(found.workers, source / "workers.csv")
    _refuse_private(found.timelines, source / "timelines.csv")
    beside = files_of_workers(source)
    if (path := source / "plan.json").is_file():
        beside[path.name] = json_text(read_json(path))
        _refuse_private_text(beside[path.name], path)
    return beside


def _machine(campaign: Campaign, source: Path, root: Path) -> Machine | None:
    """The peaks of the machine that measured the campaign, or None. Raises InputError for another machine's."""
    beside, own = source / "machine.json", root / "data/raw/machine/machine.json"
    path = beside if beside.is_file() else own
    if not path.is_file():
        return None
    machine = read_machine(path)
    measured = set(zip(campaign.runs["cpu_model"], campaign.runs["memory_bytes"], strict=True))
    if measured == {(machine.device, machine.memory_bytes)}:
        _refuse_private_text(machine.model_dump_json(), path)
        return machine
    if path == own:
        return None
    raise InputError(
        f"{path}: device = {machine.device!r}, memory_bytes = {machine.memory_bytes}: is not the machine of the runs; "
        "remove the file or measure it there"
    )


def _refuse_private(table: pd.DataFrame, path: Path) -> None:
    """Raise InputError for the first cell that names this host, its user, their home or any absolute path."""
    for column in table.select_dtypes("str"):
        for value in table[column].dropna().unique():
            if what := _private(value):
                row = table.index[table[column] == value][0]
                raise InputError(f"{path}: line {row + 2}: {column} = {value!r}: holds {what}; replace it in the cell")


def _refuse_private_text(text: str, path: Path) -> None:
    if what := _private(text):
        raise InputError(f"{path}: holds {what}; replace it there")


def _private(text: str) -> str | None:
    """What in `text` must not be published, in words; None if there is nothing."""
    for what, word in _private_words():
        if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text, re.IGNORECASE):
            return what
    return "an absolute path" if ABSOLUTE_PATH.search(text) else None


def _private_words() -> list[tuple[str, str]]:
    host = socket.gethostname()
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = os.environ.get("USER", "")
    words = [("the host's name", host), ("the host's name", host.split(".")[0]), ("the user's name", user)]
    words.append(("the user's home folder", os.path.expanduser("~")))
    return [(what, word) for what, word in words if word and word not in ("localhost", "/")]
