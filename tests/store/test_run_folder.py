"""The folder of a run: documents that are complete or not there, of one network."""

from dataclasses import replace

import pytest

from depthfold.core import LatencyTable, Network
from depthfold.errors import InvalidValue, RunError
from depthfold.store import RunFolder
from depthfold.store.run_folder import LATENCY, NETWORK
from structures import mobilenet_v2, vgg19
from tables import latency_table


@pytest.fixture
def folder(tmp_path):
    return RunFolder.open(tmp_path / "deep" / "run")


def test_what_is_written_is_read_again_and_what_was_not_is_none(folder):
    table = latency_table({(0, 1): 1.0, (1, 2): 2.0, (0, 2): 2.5})
    assert folder.read(LATENCY, LatencyTable) is None
    folder.write(LATENCY, table)
    assert RunFolder.open(folder.path).read(LATENCY, LatencyTable) == table
    assert sorted(path.name for path in folder.path.iterdir()) == [LATENCY]


def test_a_folder_belongs_to_one_network(folder):
    folder.claim(mobilenet_v2())
    folder.claim(mobilenet_v2())
    assert folder.read(NETWORK, Network) == mobilenet_v2()
    with pytest.raises(RunError, match=r"belongs to another network: .* with 50 layers .*this one is .* with 16 "):
        folder.claim(vgg19())


def test_what_an_older_version_knew_of_the_same_network_is_brought_up_to_date(folder):
    """Later stages read it without tracing again."""
    network = replace(mobilenet_v2(), ends_in_output=True)
    folder.claim(replace(network, ends_in_output=False))
    folder.claim(network)
    assert folder.read(NETWORK, Network) == network


def test_looking_whether_it_is_a_networks_writes_nothing(folder):
    assert not folder.knows(mobilenet_v2()) and not list(folder.path.iterdir())
    folder.claim(mobilenet_v2())
    assert folder.knows(mobilenet_v2())
    with pytest.raises(RunError, match="belongs to another network"):
        folder.knows(vgg19())


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(InvalidValue, match="The run folder has an empty name"):
        RunFolder.open("")


def test_a_damaged_document_is_named(folder):
    table = latency_table({(0, 1): 1.0})
    folder.write(LATENCY, table)
    path = folder.path / LATENCY
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RunError, match=r"latency.json is damaged: This is not JSON.*Delete it, and run again"):
        folder.read(LATENCY, LatencyTable)


def test_a_document_that_was_changed_is_refused_unless_its_seal_is_taken_off(folder):
    folder.write(LATENCY, latency_table({(0, 1): 1.25}))
    path = folder.path / LATENCY
    path.write_text(path.read_text().replace("1.25", "0.25"))
    with pytest.raises(
        RunError, match=r"latency.json is damaged: It was changed after depthfold wrote it: its seal.*'seal'"
    ):
        folder.read(LATENCY, LatencyTable)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if '"seal"' not in line))
    assert folder.read(LATENCY, LatencyTable) == latency_table({(0, 1): 0.25})


def test_what_is_missing_names_the_command(folder):
    with pytest.raises(RunError, match=r"has no latency.json yet. Run: depthfold latency"):
        folder.need(LATENCY, LatencyTable, "depthfold latency")


def test_a_file_in_the_place_of_the_folder_is_a_clear_error(tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(RunError, match="cannot be used: File exists"):
        RunFolder.open(tmp_path / "run")


def test_a_folder_that_vanished_is_a_clear_error(folder):
    folder.path.rmdir()
    with pytest.raises(RunError, match="cannot be used: No such file or directory"):
        folder.write(LATENCY, latency_table({(0, 1): 1.0}))


def test_what_is_no_path_is_refused():
    with pytest.raises(InvalidValue, match=r"^The folder of a run must be a path, found 5. Pass a string or"):
        RunFolder.open(5)
