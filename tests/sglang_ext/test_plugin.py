"""The plugin leaves every process with Python's garbage collection on."""

import gc
import runpy
from collections.abc import Iterator

import pytest

from sglang_ext import active, plugin


@pytest.fixture
def imported() -> Iterator[None]:
    """What a process of a server does first: multiprocessing runs the launcher's top."""
    try:
        runpy.run_module("sglang_ext.launch_server", run_name="__mp_main__")
        assert not gc.isenabled()
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("imported")
def test_garbage_is_looked_for_again_once_the_plugin_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "has_policy", lambda: False)
    plugin.register()
    assert gc.isenabled()


@pytest.mark.usefixtures("imported")
def test_it_is_where_the_plugin_failed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError

    monkeypatch.setattr(active, "has_policy", lambda: True)
    monkeypatch.setattr(plugin, "_register", fail)
    with pytest.raises(OSError):
        plugin.register()
    assert gc.isenabled()
