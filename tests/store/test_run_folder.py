"""The run folder: artefacts that are complete or absent, reused if their inputs are the same, of one network."""

from dataclasses import replace

import pytest

from depthfold.core import Environment, LatencyTable, Network
from depthfold.errors import InvalidValue, RunError
from depthfold.store import RunFolder
from depthfold.store.run_folder import LATENCY, NETWORK, RESULT, RUN
from structures import mobilenet_v2, vgg19
from tables import latency_table

ONE, TWO = latency_table({(0, 1): 1.0}), latency_table({(0, 1): 2.0})


@pytest.fixture
def folder(tmp_path):
    return RunFolder.open(tmp_path / "deep" / "run")


def made(folder, made_from, table, name=LATENCY):
    """Make an artefact; return it and whether it was built."""
    built = []

    def build():
        built.append(table)
        return table

    return folder.make(name, LatencyTable, made_from, build), bool(built)


def test_a_written_document_is_read_back_and_a_missing_one_is_none(folder):
    table = latency_table({(0, 1): 1.0, (1, 2): 2.0, (0, 2): 2.5})
    assert folder.read(LATENCY, LatencyTable) is None
    folder.write(LATENCY, table)
    assert RunFolder.open(folder.path).read(LATENCY, LatencyTable) == table
    assert sorted(path.name for path in folder.path.iterdir()) == [LATENCY, RUN]


def test_make_reuses_an_artefact_of_the_same_inputs_and_rebuilds_one_of_others(folder):
    inputs = {"environment": Environment(machine="lab"), "space": "paper", "seeds": [1, 2]}
    assert made(folder, inputs, ONE) == (ONE, True)
    assert made(RunFolder.open(folder.path), dict(inputs), TWO) == (ONE, False)
    for changed in ({"space": "full"}, {"environment": Environment(machine="desk")}, {"seeds": [1]}, {"new": None}):
        assert made(folder, inputs | changed, TWO) == (TWO, True)
        assert made(folder, inputs, ONE) == (ONE, True)
    assert made(folder, {"space": "paper"}, TWO, "other.json") == (TWO, True)  # each has its own inputs
    assert made(folder, inputs, TWO) == (ONE, False)


def test_an_artefact_is_rebuilt_if_it_was_deleted_or_has_no_record(folder):
    made(folder, {"a": "1"}, ONE)
    (folder.path / LATENCY).unlink()
    assert made(folder, {"a": "1"}, TWO) == (TWO, True)
    (folder.path / RUN).unlink()
    assert made(folder, {"a": "1"}, ONE) == (ONE, True)


def test_an_artefact_that_was_not_finished_is_not_current(folder):
    """Neither the new nor the old inputs are recorded while it is written."""
    with folder.making(RESULT, {"student": "a"}):
        pass
    for interrupted in (True, False):
        try:
            with folder.making(RESULT, {"student": "b"}) as path:
                assert path == folder.path / RESULT and folder.made_from(RESULT) is None
                if interrupted:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert folder.made_from(RESULT) is None
    assert folder.made_from(RESULT) == {"student": "b"}


def test_a_failed_build_leaves_the_artefact_before(folder):
    made(folder, {"a": "1"}, ONE)
    with pytest.raises(ZeroDivisionError):
        folder.make(LATENCY, LatencyTable, {"a": "2"}, lambda: 1 / 0)
    assert made(folder, {"a": "1"}, TWO) == (ONE, False)


def test_forget_deletes_the_document_and_its_record(folder):
    made(folder, {"a": "1"}, ONE)
    folder.forget(LATENCY)
    assert folder.read(LATENCY, LatencyTable) is None and folder.made_from(LATENCY) is None
    folder.forget(LATENCY)


def test_a_folder_belongs_to_one_network(folder):
    folder.claim(mobilenet_v2())
    folder.claim(mobilenet_v2())
    assert folder.read(NETWORK, Network) == mobilenet_v2()
    with pytest.raises(RunError, match=r"belongs to another network: .* with 50 layers .*this one is .* with 16 "):
        folder.claim(vgg19())


def test_a_folder_belongs_to_one_set_of_weights(folder):
    folder.claim_weights("0123")
    made(folder, {"a": "1"}, ONE)
    RunFolder.open(folder.path).claim_weights("0123")
    with pytest.raises(RunError, match=r"belongs to other weights of this network \(0123; these are 4567\)"):
        folder.claim_weights("4567")


def test_an_older_description_of_the_same_network_is_replaced(folder):
    """Later stages read it without tracing."""
    network = replace(mobilenet_v2(), ends_in_output=True)
    folder.claim(replace(network, ends_in_output=False))
    folder.claim(network)
    assert folder.read(NETWORK, Network) == network


def test_knows_writes_nothing(folder):
    assert not folder.knows(mobilenet_v2()) and not list(folder.path.iterdir())
    folder.claim(mobilenet_v2())
    assert folder.knows(mobilenet_v2())
    with pytest.raises(RunError, match="belongs to another network"):
        folder.knows(vgg19())


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(InvalidValue, match="The run folder has an empty name"):
        RunFolder.open("")


@pytest.mark.parametrize("name", [LATENCY, RUN])
def test_a_damaged_document_is_named(name, folder):
    folder.write(LATENCY, ONE, {"a": "1"})
    path = folder.path / name
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RunError, match=rf"{name} is damaged: This is not JSON.*Delete it and run again"):
        made(folder, {"a": "1"}, ONE)


def test_a_missing_document_names_the_command(folder):
    with pytest.raises(RunError, match=r"has no latency.json yet. Run: depthfold latency"):
        folder.need(LATENCY, LatencyTable, "depthfold latency")


def test_a_file_in_the_place_of_the_folder_is_a_clear_error(tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(RunError, match="cannot be used: File exists"):
        RunFolder.open(tmp_path / "run")


def test_a_folder_that_vanished_is_a_clear_error(folder):
    folder.path.rmdir()
    with pytest.raises(RunError, match="cannot be used: No such file or directory"):
        folder.write(LATENCY, ONE)


def test_two_processes_cannot_use_one_folder(folder):
    with folder.lock(), pytest.raises(RunError, match="is in use by another process"), folder.lock():
        pass
    with folder.lock():
        pass


def test_only_a_path_is_accepted():
    with pytest.raises(InvalidValue, match=r"^The run folder must be a path, found 5. Pass a string or a path"):
        RunFolder.open(5)
