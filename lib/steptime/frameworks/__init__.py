"""The frameworks, each run in child processes of its own. Importing this loads none of them."""

from steptime.frameworks.child import Child, ChildError
from steptime.frameworks.settings import SETTINGS, Setting, installed_version, missing_packages

__all__ = ["SETTINGS", "Child", "ChildError", "Setting", "installed_version", "missing_packages"]
