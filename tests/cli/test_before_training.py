"""What is refused before it costs anything: budgets out of reach, doubtful tables, images that cannot be read."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from cli_workshop import depthfold, refused
from depthfold.tasks import image_folder

FOLDER_NET = """
from torch import nn

def model():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
"""


@pytest.fixture
def asked(workshop, tmp_path):
    def command(name, *options):
        return (name, "--config", workshop / "tiny.toml", "--run", tmp_path / "run", *options)

    return command


def test_budget_out_of_reach_costs_no_training(asked, tmp_path):
    said = refused(*asked("compress", "--budget", "20x"))
    assert "No plan meets the budget of 20x" in said and "of the original's" in said and "nothing was trained" in said
    assert (tmp_path / "run/latency.json").exists()
    assert not (tmp_path / "run/importance.jsonl").exists() and not (tmp_path / "run/students").exists()
    assert "No plan meets the budget of 20x" in refused("importance", "--run", tmp_path / "run")  # the run knows it
    assert not (tmp_path / "run/importance.jsonl").exists()
    done = depthfold("importance", "--run", tmp_path / "run", "--budget", "95%")
    assert done.exit_code == 0 and (tmp_path / "run/importance.json").exists(), done.output


def test_network_at_chance_level_is_warned_about_before_it_is_trained(asked, monkeypatch):
    """The network of these tests has random weights."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("depthfold.pipeline.artefacts.measure_importance", interrupted)
    for command in (asked("compress"), asked("importance")):
        done = depthfold(*command)
        said = " ".join(done.stderr.split())
        assert done.exit_code == 130, done.output
        assert re.search(r"score of the original: 1 of 1, done; [\d.]+% ± [\d.]+ on the hold-out set", said)
        assert "which is no better than chance for 3 classes. Check its weights, the normalisation" in said


def test_latency_table_of_another_space_costs_no_training(run):
    for name in ("importance.json", "importance.jsonl"):
        (run / name).unlink()
    path = run / "latency.json"
    table = json.loads(path.read_text())
    table["entries"] = [each for each in table["entries"] if each["span"] != {"i": 0, "j": 2}]
    path.write_text(json.dumps(table))
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('budget = "80%"', ""))  # nothing but the table is checked
    said = refused("importance", "--run", run, "--space", "full")
    assert "The latency table has no entry for (0, 2], which the importance table has. Measure it" in said
    assert not (run / "importance.jsonl").exists()


def test_surrogate_is_fitted_to_tables_that_lack_the_same_span(run, monkeypatch):
    """Without a budget, only solving decides whether the two tables fit."""

    def fitted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("depthfold.pipeline.artefacts.fit_surrogate", fitted)
    for name in ("latency", "importance"):
        table = json.loads((run / f"{name}.json").read_text())
        table["entries"] = [one for one in table["entries"] if (one["span"]["i"], one["span"]["j"]) != (0, 2)]
        (run / f"{name}.json").write_text(json.dumps(table))
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('budget = "80%"', ""))
    assert depthfold("surrogate", "--run", run).exit_code == 130


def test_importances_that_favour_a_fraction_of_the_network_give_a_warning_before_training(run, monkeypatch):
    """As after trainings that are too short: single layers lose most, and one convolution is the best network."""

    def finetuned(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("depthfold.pipeline.compression.finetune", finetuned)
    for name, change in (
        ("latency", lambda one: one | {"times": [1.0, 1.0]}),
        ("importance", lambda one: one | {"samples": [60.0 if one["span"]["j"] == one["span"]["i"] + 1 else 90.0]}),
    ):
        table = json.loads((run / f"{name}.json").read_text())
        base = {"base": 100.0} if name == "importance" else {}
        seeds = [one | {"seeds": [0]} if base else one for one in table["entries"]]
        (run / f"{name}.json").write_text(json.dumps(table | base | {"entries": list(map(change, seeds))}))
    given = [part for name in ("latency", "importance") for part in (f"--{name}", run / f"{name}.json")]
    for command, code in ((("solve", "--run", run), 0), (("compress", "--run", run, "--budget", "95%", *given), 130)):
        done = depthfold(*command)
        assert done.exit_code == code, done.output
        said = " ".join(done.stderr.split())
        assert "Warning: By these importances, a network at 33% of the latency is better than the unchanged one" in said
        assert "--method brief" in said and "--alpha" in said and "--surrogate" in said


def test_budget_that_the_original_meets_gives_a_warning(run):
    (run / "importance.json").unlink()
    (run / "importance.jsonl").unlink()
    done = depthfold("importance", "--run", run, "--budget", "1x")
    assert done.exit_code == 0 and "already" not in done.stderr, done.output
    done = depthfold("importance", "--run", run, "--budget", "0.5x", "--method", "trained")
    assert "The original meets the budget of 0.5x already" in " ".join(done.stderr.split())


def test_doubtful_table_stops_before_training(run):
    for name in ("importance.json", "importance.jsonl"):
        (run / name).unlink()
    path = run / "latency.json"
    table = json.loads(path.read_text())
    table["calibration"]["median_error"] = 0.08
    path.write_text(json.dumps(table))
    for command in ("importance", "compress"):
        said = refused(command, "--run", run)
        assert "The latency table is doubtful, so nothing was trained: it is calibrated on" in said
        assert "--allow-doubtful" in said
    assert not (run / "importance.jsonl").exists()
    done = depthfold("importance", "--run", run, "--allow-doubtful")
    assert done.exit_code == 0 and (run / "importance.json").exists(), done.output


@pytest.fixture
def photos(tmp_path):
    """Two classes of small JPEG and PNG files."""
    random = np.random.default_rng(0)
    for part, number in (("train", 8), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for n in range(number):
                pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                suffix = "png" if n % 2 else "jpg"
                Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{n}.{suffix}")
    (tmp_path / "net.py").write_text(FOLDER_NET)
    return tmp_path / "photos"


def compress(photos, size=("--input", "3x16x16")):
    net = f"{photos.parent / 'net.py'}:model"
    data = ("--data", f"imagefolder:{photos}", *size, "--target", "cost_model", "--budget", "20x")
    return ("compress", net, *data, "--export", "model.pt2", "--run", photos.parent / "run")


def test_images_that_cannot_be_read_cost_no_measurement(photos):
    bad = [photos / file for file in ("train/cat/2.jpg", "train/dog/3.png", "val/dog/0.jpg")]
    for path in bad:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * 2 // 3])
    (photos / "val/cat/1.png").write_text("not an image")
    said = refused(*compress(photos))
    assert "4 images of 20 cannot be read: " in said
    assert all(f"{path}: " in said for path in (*bad, photos / "val/cat/1.png"))
    assert said.endswith("Download them again, or remove them from their folders.")
    assert not (photos.parent / "run").exists()
    for path in (*bad, photos / "val/cat/1.png"):
        path.unlink()
    assert "No plan meets the budget of 20x" in refused(*compress(photos))  # reached after the first measurement


@pytest.mark.parametrize("file", ["train/dog/6.jpg", "val/cat/1.png"])
def test_images_of_several_sizes_cost_no_measurement(photos, file):
    """JPEG files are decoded at an eighth of their size, so their sizes come from their headers."""
    assert "No plan meets the budget of 20x" in refused(*compress(photos, size=()))  # all have one size
    shutil.rmtree(photos.parent / "run")
    Image.new("RGB", (17, 16)).save(photos / file)
    said = refused(*compress(photos, size=()))
    assert re.search(rf"The images differ in size: \S+/train/\S+ is 16 x 16, {photos / file} is 16 x 17\. ", said)
    assert said.endswith("size=... of the task in Python, --input 3x224x224 on the command line.")
    assert not (photos.parent / "run").exists()
    assert "No plan meets the budget of 20x" in refused(*compress(photos))  # reached after the first measurement


def test_changed_images_are_compared_with_those_that_were_read_before(photos):
    refused(*compress(photos, size=()))
    for path in sorted(photos.glob("val/*/*")):
        Image.new("RGB", (20, 20)).save(path)
    assert re.search(
        r"differ in size: \S+/train/\S+ is 16 x 16, \S+/val/\S+ is 20 x 20\.", refused(*compress(photos, size=()))
    )


def test_images_are_read_once_for_each_run(photos, monkeypatch):
    checked, check = [], image_folder.check_files

    def read(paths, progress, **options):
        checked.append(len(paths))
        check(paths, progress, **options)

    monkeypatch.setattr("depthfold.tasks.classification.check_files", read)
    refused(*compress(photos))
    assert checked == [20]  # once, although compress() also checks them
    refused("importance", "--run", photos.parent / "run")
    assert checked == [20]
    (photos / "val/cat/0.jpg").write_bytes((photos / "val/dog/0.jpg").read_bytes())
    refused(*compress(photos))
    assert checked == [20, 4]


def test_inspect_with_a_target_says_what_can_be_gained(run, workshop, tmp_path):
    net = f"{workshop / 'net.py'}:model"
    alone = depthfold("inspect", net, "--input", "1x8x8", "--target", "cost_model", "--run", tmp_path / "new").stdout
    assert "The latency table: 5 distinct blocks and 20 networks to time: up to" in alone
    assert "of the original's" in alone and "spans save time as one convolution" in alone
    assert (
        re.search(r"Worth trying: budgets of \d+% and more can be met", alone)
        and 'to measure with the method "brief"; their time depends on the data' in alone
    )
    assert (tmp_path / "new/latency.json").read_bytes() == (run / "latency.json").read_bytes()  # it is kept
    found = json.loads(depthfold("inspect", "--run", run, "--json").stdout)
    assert found["cost"] is None  # the run has the table
    assert found["network"]["name"] == "Sequential"
    told = found["prospects"]
    assert f"fastest plan takes {told['fastest']:.4g} ms" in alone
    assert told["importances"] > 0 and told["seconds"] > 0  # three steps each
    assert told["savings"][0]["layers"] > told["savings"][0]["merged"]


@pytest.mark.parametrize(
    ("model", "size"),
    [("torchvision:squeezenet1_1", "3x224x224"), ("timm:mobilenetv3_small_050,in_chans=1", "1x224x224")],
)
def test_models_of_libraries_have_a_usual_input(model, size, monkeypatch):
    traced = []
    monkeypatch.setattr("depthfold.settings.session.trace", lambda _, inputs, **__: traced.append(inputs) or 1 / 0)
    depthfold("inspect", model)
    assert "x".join(map(str, traced[0].shape[1:])) == size
    depthfold("inspect", model, "--input", "3x64x64")
    assert traced[1].shape[1:] == (3, 64, 64)
