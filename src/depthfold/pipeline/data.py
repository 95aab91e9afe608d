"""Data by name: cifar10:PATH, imagefolder:PATH and their like, or file.py:function."""

from __future__ import annotations

from pathlib import Path

from depthfold.errors import DataError
from depthfold.pipeline.user_file import call, find_in_file, names_file
from depthfold.support.text import did_you_mean
from depthfold.tasks import ClassificationTask
from depthfold.training import Task

KINDS = {
    "cifar10": ClassificationTask.cifar10,
    "cifar100": ClassificationTask.cifar100,
    "fashion-mnist": ClassificationTask.fashion_mnist,
    "imagefolder": ClassificationTask.image_folder,
}
FORMS = f"Data is {', '.join(f'{kind}:PATH' for kind in KINDS)} or file.py:function"


def task_of(text: str, size: tuple[int, int] | None = None) -> Task:
    """The task; its images are brought to `size`, unless it comes from a file of the user's."""
    if names_file(text):
        found = find_in_file(text, "The data")
        task = found if isinstance(found, Task) and not isinstance(found, type) else call(found, text, "The data")
        if not isinstance(task, Task):
            raise DataError(
                f"The data {text!r} must be a function that returns a task, one with the methods loss, score and "
                f"steps_per_epoch; it returned {task!r:.80}. df.ClassificationTask.tensors(train=(images, labels), "
                "test=(images, labels)) makes one."
            )
        return task
    kind, path = split_data(text)
    return KINDS[kind](path, size=size)


def expect_size(task: Task, size: tuple[int, int]) -> None:
    """Refuse images of another size than was asked for, where the task says which: times would be those of one size,
    scores those of another."""
    if not isinstance(task, ClassificationTask):
        return
    height, width = task.example().shape[2:]
    if (height, width) != size:
        raise DataError(
            f"The images of the data are {height}x{width}, and --input asks for {size[0]}x{size[1]}. Images that a "
            "function in a file gives stay as they are: leave --input out, or let the function give images of that "
            "size."
        )


def split_data(text: str) -> tuple[str, Path]:
    """The kind and the path of "kind:PATH", which must be there."""
    kind, colon, place = text.partition(":")
    if kind not in KINDS or not colon or not place:
        hint = did_you_mean(kind, KINDS, lambda close: f"{close}:{place or 'PATH'}")
        raise DataError(f"The data {text!r} cannot be read. {hint}{FORMS}.")
    path = Path(place).expanduser().absolute()
    if not path.is_dir():
        raise DataError(f"The data {text!r} is missing: there is no folder {path}. Download it there, or name another.")
    return kind, path
