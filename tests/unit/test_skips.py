"""A skipped test must have a reason that is on the list of tests/conftest.py."""

import conftest
import pytest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("needs two cores, to take one away", True),
        ("apt-get install -y chromium", True),
        ("no reason at all", False),
        ("environment caffe is not made: steptime env create caffe", True),
    ],
)
def test_reasons(reason: str, allowed: bool) -> None:
    assert conftest.may_skip(reason) is allowed


def test_in_ci_mxnet_may_only_skip_without_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "environment mxnet is not made: steptime env create mxnet"
    monkeypatch.setattr(conftest, "interpreter_of", lambda environment: True)
    monkeypatch.delenv("CI", raising=False)
    assert conftest.may_skip(reason)
    monkeypatch.setenv("CI", "1")
    assert not conftest.may_skip(reason)
    monkeypatch.setattr(conftest, "interpreter_of", lambda environment: False)
    assert conftest.may_skip(reason)


@pytest.mark.parametrize(("reason", "status"), [("needs two cores", 0), ("tired", 1)])
def test_a_refused_skip_fails_the_session(pytester: pytest.Pytester, reason: str, status: int) -> None:
    pytester.makeconftest(
        f"import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('study', {conftest.__file__!r})\n"
        f"study = importlib.util.module_from_spec(spec)\n"
        f"spec.loader.exec_module(study)\n"
        f"def pytest_configure(config):\n    config.pluginmanager.register(study.SkipsChecked())\n"
    )
    pytester.makepyfile(f"import pytest\ndef test_one():\n    pytest.skip({reason!r})\n")
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider").ret == status
