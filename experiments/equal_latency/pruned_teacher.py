"""The teacher of a network whose channels were pruned: its last linear layer reads only what the student kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KeptFeatures(nn.Module):
    """The last layer of a teacher. Its linear layer that runs last, `kept`, reads the features that a student kept."""

    def __init__(self, last: nn.Linear, kept: list[int]) -> None:
        super().__init__()
        self.last, self.kept = last, nn.Linear(len(kept), 1)
        self.indices: Tensor
        self.register_buffer("indices", torch.tensor(kept))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.last(x)
        self.kept(x[:, self.indices])  # the training matches its input
        return outputs  # type: ignore[no-any-return]


def show_kept_features(teacher: nn.Module, student: nn.Module) -> None:
    """Replace the last layer of the teacher, so that its features can be matched by a pruned student.

    Pruning does not change weights, so the columns of the student's last layer are columns of the teacher's.
    """
    name, last = _last_linear(teacher)
    # The steps of pruning are kept in float16.
    columns = {tuple(column): number for number, column in enumerate(last.weight.half().T.tolist())}
    assert len(columns) == last.in_features, "Columns of the last layer are equal, so they cannot be told apart."
    kept = [columns[tuple(column)] for column in _last_linear(student)[1].weight.half().T.tolist()]
    teacher.set_submodule(name, KeptFeatures(last, kept))


def _last_linear(network: nn.Module) -> tuple[str, nn.Linear]:
    return [(name, part) for name, part in network.named_modules() if isinstance(part, nn.Linear)][-1]
