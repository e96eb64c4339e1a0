"""Which tasks a step's name means, from a task."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.pipelines.description import pipeline_from_table
from phalanx.cluster.pipelines.graph import TaskGraph
from tests.examples import examples

VALUES = st.lists(st.sampled_from([1, 2, 3, "a", "1"]), min_size=1, max_size=3, unique=True)
LISTS = st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3)


@examples(100)
@given(LISTS, LISTS)
def test_a_name_means_the_tasks_with_the_same_shared_values_in_their_order(
    first: dict[str, list[object]], second: dict[str, list[object]]
) -> None:
    steps = {
        "a": {"command": ["true"], "for_each": first},
        "b": {"command": ["true"], "for_each": second, "after": ["a"]},
    }
    graph = TaskGraph(pipeline_from_table({"name": "p", "steps": steps}))
    others = {each.name: each.values for each in graph.in_order if each.step_name == "a"}
    for task in graph.in_order:
        if task.step_name == "b":
            same = [
                name
                for name, values in others.items()
                if all(values[key] == task.values[key] for key in values if key in task.values)
            ]
            assert sorted(each.task for each in task.waits) == sorted(same)
            assert graph.matching("a", task.values) == [each.task for each in task.waits]
