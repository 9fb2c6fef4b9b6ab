"""How the cluster client waits and asks, without a cluster: its control actor is a function here."""

from __future__ import annotations

import pickle

import pytest

from rlplane.adapters.transfer_queue import TQDataPlaneClient, client, plane
from rlplane.config import load_config
from rlplane.errors import ClientClosedError, ConfigError, UnknownTaskError
from rlplane.objects import encode_tags


@pytest.fixture
def make(monkeypatch):
    """A client whose control actor answers as the test says, and the pauses that it makes."""
    pauses = []
    monkeypatch.setattr(client.time, "sleep", pauses.append)

    def build(answer, poll_s=0.1):
        made = TQDataPlaneClient.__new__(TQDataPlaneClient)
        made._closed, made._owner, made._allow_pickle, made._poll_s = False, 1, False, poll_s
        made._ask = answer
        return made, pauses

    return build


def test_a_waiting_claim_asks_again_after_a_millisecond_and_then_less_and_less(make):
    asked = []

    def answer(method, *args):
        asked.append(method)
        return (["a"], encode_tags([{}])) if len(asked) == 30 else None

    made, pauses = make(answer, poll_s=0.1)
    assert made.claim_meta("p", "t", ["x"], 1).sample_ids == ["a"]
    assert asked == ["claim"] + ["poll"] * 29
    assert pauses[0] == 0.001 and max(pauses) == 0.1 and pauses[-1] == 0.1
    assert pauses == sorted(pauses)


def test_a_claim_that_runs_out_of_time_gives_its_place_up(make):
    asked = []

    def answer(method, *args):
        asked.append(method)
        return (["late"], encode_tags([{}])) if method == "give_up_claim" else None

    made, _ = make(answer)
    assert made.claim_meta("p", "t", ["x"], 1, timeout_s=0).sample_ids == ["late"]
    assert asked == ["claim", "give_up_claim"]


def test_a_claim_that_is_interrupted_is_taken_back(make, monkeypatch):
    asked = []

    def answer(method, *args):
        asked.append(method)

    made, _ = make(answer)
    monkeypatch.setattr(client.time, "sleep", lambda pause: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made.claim_meta("p", "t", ["x"], 1)
    assert asked == ["claim", "cancel_claim"]


def test_a_claim_ends_when_its_client_is_closed_under_it(make, monkeypatch):
    made, _ = make(lambda method, *args: None)
    monkeypatch.setattr(client.time, "sleep", lambda pause: setattr(made, "_closed", True))
    with pytest.raises(ClientClosedError):
        made.claim_meta("p", "t", ["x"], 1)


def test_an_error_of_the_control_actor_ends_a_waiting_claim(make):
    def answer(method, *args):
        if method == "poll":
            raise UnknownTaskError("the task was removed")

    made, _ = make(answer)
    with pytest.raises(UnknownTaskError):
        made.claim_meta("p", "t", ["x"], 1)


def test_a_closed_client_refuses_and_does_not_pickle(make):
    made, _ = make(lambda *args: None)
    made._closed = True
    with pytest.raises(ClientClosedError):
        made.list_sample_ids("p")
    with pytest.raises(ClientClosedError):
        pickle.dumps(made)
    made.close()


def test_the_address_of_a_local_plane_is_no_ray_cluster():
    cfg = load_config("cluster-simple", {"controller_address": "ipc:///run/somewhere/plane"})
    with pytest.raises(ConfigError, match="address of a Ray cluster"):
        plane._address(cfg)
    assert (
        plane._address(load_config("cluster-simple", {"controller_address": "10.0.0.1:6379"}))
        == "10.0.0.1:6379"
    )


def test_the_time_an_answer_may_take_is_that_of_the_config():
    assert plane.ack_timeout_s(load_config("cluster-simple", {"ack_timeout_ms": 1500})) == 1.5
    assert plane.ack_timeout_s(load_config("cluster-simple")) == 30.0


def test_only_what_a_plane_is_made_from_has_to_agree():
    ours = load_config("cluster-simple", {"local_buffer_size": 1, "allow_pickle": True})
    theirs = load_config("cluster-simple", {"global_segment_size": 5})
    assert plane.plane_config(ours) == plane.plane_config(theirs)
    bigger = load_config("cluster-simple", {"storage_capacity": 5})
    assert plane.plane_config(ours) != plane.plane_config(bigger)
    mooncake = load_config("cluster-mooncake", {"global_segment_size": 5})
    assert plane.plane_config(mooncake) != plane.plane_config(load_config("cluster-mooncake"))


def test_the_pause_is_no_longer_than_the_time_that_is_left(make):
    late = (["x"], encode_tags([{}]))
    made, pauses = make(lambda method, *args: late if method == "give_up_claim" else None, poll_s=60)
    made.claim_meta("p", "t", ["x"], 1, timeout_s=0.0005)
    assert all(pause <= 0.0005 for pause in pauses)
