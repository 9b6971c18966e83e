"""Measuring: cases in fresh child processes, in random order over rounds, into a campaign."""

from steptime.measure.add import add_campaign, check_names
from steptime.measure.fingerprint import fingerprints, write_fingerprints
from steptime.measure.peak_rates import check_peaks, peaks
from steptime.measure.plan import Case, Plan, read_plan, read_plan_file
from steptime.measure.rounds import measure
from steptime.measure.torch_module import measure_module, module_network

__all__ = [
    "Case",
    "Plan",
    "add_campaign",
    "check_names",
    "check_peaks",
    "fingerprints",
    "measure",
    "measure_module",
    "module_network",
    "peaks",
    "read_plan",
    "read_plan_file",
    "write_fingerprints",
]
