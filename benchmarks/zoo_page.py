"""Format the rows of the zoo as a page, and one row as a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from zoo_row import passed

HEAD = """
Each network has random weights and random batch norm statistics, except for those that a package ships with trained
weights. It is rewritten according to four random plans (one from the paper's search space, three from the full one) and
merged. The last plan also drops layers and branches.

- `spans`: the number of spans in the paper's search space / in the full one. If the full space has no more spans than
  the network has layers, there is nothing to merge.
- `segments`: the number of segments of each of the four plans.
- `dropped`: the number of layers and of residual branches that the last plan drops, of those that can be dropped.
- `error`: the largest difference between the rewritten and the merged network over the four plans, at the borders, in
  the interior or at the outputs, as a share of the largest value there. The tolerance is 1e-10 in float64 and 1e-4 in
  float32. An output may exceed it only if the network itself is that sensitive: up to ten times the change at the
  output when every number of the input changes in its last digit, the largest of four such changes.
- `other size`: the same error for inputs of a different size than the traced one, with the same networks. If the model
  does not accept another size, the cell shows the start of its error message.
- `vanilla`: the largest difference between the outputs of the original model and of the merged network, at both sizes,
  for the plan that changes nothing. Networks without layers have only this value.
- `refused`: how often each refusal code occurs.

"""
COLUMNS = {
    "network": "---",
    "parameters": "---:",
    "input": "---",
    "layers": "---:",
    "skips": "---:",
    "spans": "---:",
    "segments": "---",
    "dropped": "---",
    "error": "---:",
    "other size": "---",
    "vanilla": "---:",
    "precision": "---",
    "refused": "---",
}
WORDS = 48  # characters of an error message to show


def page(rows: list[dict[str, Any]]) -> str:
    failed = sum(not passed(row) for row in rows)
    places = Counter(row["environment"] for row in rows if "environment" in row)
    where = "; ".join(f"{environment} ({count} of them)" for environment, count in places.most_common())
    title = f"# The zoo\n\nMade by `make zoo`: {len(rows)} networks, {failed} failed. {where}.\n"
    return title + HEAD + "\n".join((_cells(COLUMNS), _cells(COLUMNS.values()), *map(_entry, rows))) + "\n"


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}: FAILED {row['error']}"
    return (
        f"{row['name']}: {row['layers']} layers, {row['paper']}/{row['full']} spans, dropped {_dropped(row)}, "
        f"error {_number(_worst(row))}, other size {_other(row)}, vanilla {_number(_vanilla(row))}, {row['seconds']} s"
        + ("" if passed(row) else f"; FAILED {_failure(row)}")
    )


def _entry(row: dict[str, Any]) -> str:
    if "error" in row:
        return _cells([row["name"], *[""] * (len(COLUMNS) - 2), f"**failed: {row['error']}**"])
    refused = ", ".join(f"{code} {count}" for code, count in row["refusals"].items())
    return _cells(
        (
            row["name"],
            f"{row['parameters'] / 1e6:.1f} M",
            "x".join(map(str, row["size"])),
            row["layers"],
            row["skips"],
            f"{row['paper']} / {row['full']}{' (nothing to merge)' if row['full'] <= row['layers'] else ''}",
            ", ".join(str(plan["segments"]) for plan in row["plans"]),
            _dropped(row),
            _number(_worst(row)),
            _other(row),
            _number(_vanilla(row)),
            row["precision"],
            refused if passed(row) else f"**failed: {_failure(row)}** {refused}",
        )
    )


def _cells(values: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, values))} |"


def _dropped(row: dict[str, Any]) -> str:
    dropped = {kind: sum(plan[f"{kind} dropped"] for plan in row["plans"]) for kind in ("layers", "branches")}
    return ", ".join(f"{number} of {row[f'droppable {kind}']} {kind}" for kind, number in dropped.items())


def _worst(row: dict[str, Any]) -> float | None:
    return _largest(row["plans"])


def _vanilla(row: dict[str, Any]) -> float:
    return max(row["vanilla"][which] for which in ("size", "other") if which in row["vanilla"])


def _other(row: dict[str, Any]) -> str:
    if row["refusal"] is not None:
        return row["refusal"].replace("|", "/")[:WORDS]
    error = _number(_largest([plan["other"] for plan in row["plans"]]))
    return f"{error} at {'x'.join(map(str, row['other']))}".strip()


def _largest(found: list[dict[str, Any]]) -> float | None:
    return max((max(each["border"], each["interior"], each["output"]) for each in found), default=None)


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _failure(row: dict[str, Any]) -> str:
    if row["vanilla"]["foreign"]:
        return f"the student has parameters that the model does not have, such as {row['vanilla']['foreign'][0]}"
    return "not exact" if row["vanilla"]["ok"] else "the vanilla network is not the model"
