"""A warning points at the line of the user's program, not into ours."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest

import rlplane
from rlplane.caller import warn_caller


def test_a_warning_names_the_file_that_called_however_deep_it_was_raised() -> None:
    module = ModuleType("rlplane.deep")
    vars(module)["warn_caller"] = warn_caller
    exec(
        "def one(): warn_caller('careful', RuntimeWarning)\ndef two(): one()\ndef three(): two()\n",
        vars(module),
    )
    for function in (module.one, module.two, module.three):
        with pytest.warns(RuntimeWarning, match="careful") as seen:
            function()
        assert seen[0].filename == __file__


def test_a_warning_without_a_caller_outside_is_still_given() -> None:
    code = "from rlplane.caller import warn_caller\nwarn_caller('careful', RuntimeWarning)\n"
    with pytest.warns(RuntimeWarning, match="careful"):
        exec(compile(code, "<nobody>", "exec"), {"__name__": "rlplane.script"})


@pytest.mark.parametrize("observed", [False, True])
def test_an_undeclared_field_is_warned_of_where_it_is_written(observed: bool) -> None:
    import torch
    from tensordict import TensorDict

    cfg = rlplane.load_config("local", {"observability": {"enabled": observed}} if observed else {})
    with rlplane.build_data_plane_client(cfg) as client:
        client.register_partition("p", ["x"], 10, ["t"])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            line = sys._getframe().f_lineno + 1
            client.put_samples(["a"], "p", TensorDict({"y": torch.zeros(1)}, [1]))
        assert [(each.filename, each.lineno) for each in seen if "declared" in str(each.message)] == [
            (__file__, line)
        ]
