"""What a campaign of many workers has beside runs.csv and samples.csv: workers.csv, timelines.csv and profile.csv.

`workers.csv` has a row a finished run: by which engine and schedule, over which link, what each node sent, and where a
step's time went. `timelines.csv` is the last step of each case's first run. `profile.csv` is what was replayed.
"""

from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from steptime.core.campaign import read_table
from steptime.core.errors import InputError
from steptime.core.step import LayerProfile

COMPUTED = "real compute, real communication"
EMULATED = "emulated compute, real communication"

_TEXT = pa.Column(str)
_POSITIVE = pa.Column(int, pa.Check.ge(1))
_SECONDS = pa.Column(float, pa.Check.ge(0))
_MAYBE = pa.Column(float, pa.Check.ge(0), nullable=True)

WORKERS = pa.DataFrameSchema(
    {
        "run_id": pa.Column(str, unique=True),
        "engine": _TEXT,
        "schedule": _TEXT,
        "compute": pa.Column(str, pa.Check.isin([COMPUTED, EMULATED])),
        "profile": pa.Column(str, nullable=True),
        "ranks": _POSITIVE,  # workers and parameter servers
        "nodes": _POSITIVE,  # namespaces, or 1 over loopback
        "ends": pa.Column(str, nullable=True),  # how many layers have been sent after each message, e.g. 1 3 4
        # the link; without a rate it is the loopback interface, which nothing holds back
        "rate_bits_per_s": _MAYBE,
        "alpha_s": _MAYBE,
        "beta_s_per_byte": _MAYBE,
        "unshaped_beta_s_per_byte": _MAYBE,
        # all workers at the rate would take more than a third of what this machine can move
        "is_cpu_bound": pa.Column(bool),
        # of the worker's node that sent most, a step: counted at its interface with headers; by the closed form without
        "sent_bytes": _MAYBE,
        "expected_bytes": _SECONDS,
        # medians over the timed steps of means over workers; exposed: from the last gradient to the last average
        "forward_s": _SECONDS,
        "backward_s": _SECONDS,
        "exposed_s": _SECONDS,
        "update_s": _SECONDS,
    },
    strict=True,
    ordered=True,
)

TIMELINES = pa.DataFrameSchema(
    {
        "run_id": _TEXT,
        "worker": pa.Column(int, pa.Check.ge(0)),
        "task": pa.Column(str, pa.Check.isin(["forward", "backward", "exchange", "update"])),
        "resource": pa.Column(str, pa.Check.isin(["device", "link"])),
        "layer": pa.Column(str, nullable=True),  # of an exchange: its layers, joined by +
        "start_s": _SECONDS,
        "end_s": _SECONDS,
    },
    strict=True,
    ordered=True,
)

PROFILE = pa.DataFrameSchema(
    {
        "layer": pa.Column(str, unique=True),
        "forward_s": pa.Column(float, [pa.Check.ge(0), pa.Check.le(600)]),
        "backward_s": pa.Column(float, [pa.Check.ge(0), pa.Check.le(600)]),
        "parameter_bytes": pa.Column(int, [pa.Check.ge(0), pa.Check.le(1 << 36)]),
    },
    strict=True,
    ordered=True,
)


def read_profile(path: Path, network: str, batch: int) -> LayerProfile:
    """The layer profile in a CSV file with PROFILE's columns, a row a layer in forward order; no other phases.

    Raises InputError naming file, line, column and value, also for a profile without parameters.
    """
    table = read_table(Path(path), PROFILE)
    if not table["parameter_bytes"].sum():
        raise InputError(f"{path}: parameter_bytes: no layer has any; without gradients there is nothing to send")
    return LayerProfile(
        network=network,
        source=Path(path).name,
        batch=batch,
        layers=tuple(table["layer"]),
        forward_s=table["forward_s"].to_numpy(float),
        backward_s=table["backward_s"].to_numpy(float),
        parameter_bytes=table["parameter_bytes"].to_numpy(float),
        activation_bytes=table["parameter_bytes"].to_numpy(float) * 0,
    )


def profile_table(profile: LayerProfile) -> pd.DataFrame:
    """The profile as `read_profile` reads it."""
    columns = {"forward_s": profile.forward_s, "backward_s": profile.backward_s}
    sizes = profile.parameter_bytes.astype(int)
    return pd.DataFrame({"layer": list(profile.layers), **columns, "parameter_bytes": sizes})


def csv_text(table: pd.DataFrame) -> str:
    """As the campaign's other tables are written."""
    return str(table.to_csv(index=False, float_format="%.9g", lineterminator="\n"))
