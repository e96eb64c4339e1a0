"""The search on played machines: it finds fast settings, never ends slower, keeps its budget."""

from __future__ import annotations

import statistics

import pytest

from phalanx.plan.tune.comparison import compare
from phalanx.plan.tune.search import SettingSearch
from phalanx.plan.tune.settings import Choice
from phalanx.plan.tune.trials import Phase, PredictedStep, Trial, TrialFailure, TuningBudget
from tests.plan.tune.played_machine import SETTINGS, WORST, PlayedMachine, searched

SEEDS = 24


def chosen(search: SettingSearch) -> Choice:
    values = search.outcome().values
    return tuple(values[setting.key] for setting in SETTINGS)


def test_from_bad_settings_it_comes_near_the_best_of_all_within_its_budget() -> None:
    shares = []
    for seed in range(SEEDS):
        machine = PlayedMachine(seed)
        search = searched(machine)
        assert search.outcome().changed
        assert len(search.trials) <= 40 and search.spent_seconds <= 600
        shares.append(machine.best_seconds() / machine.true_seconds(chosen(search)))
    assert statistics.mean(shares) >= 0.94
    assert sum(share >= 0.9 for share in shares) >= 0.9 * SEEDS
    assert min(shares) >= 0.8


def test_settings_that_are_good_already_are_never_exchanged_for_slower_ones() -> None:
    for seed in range(SEEDS):
        machine = PlayedMachine(seed)
        good = chosen(searched(machine))
        again = chosen(searched(machine, good))
        assert machine.true_seconds(again) <= machine.true_seconds(good) * 1.005


def test_what_a_noisy_machine_cannot_tell_apart_stays_as_it_was() -> None:
    """Every choice takes as long as any other: nothing may be adopted, but for rare luck."""

    class Flat(PlayedMachine):
        def true_seconds(self, choice: Choice) -> float:
            return 1.0

    adopted = [searched(Flat(seed, noise=0.05)).outcome().changed for seed in range(SEEDS)]
    assert sum(adopted) <= 1


def test_a_search_that_was_killed_goes_on_with_what_its_journal_has() -> None:
    machine = PlayedMachine(3)
    whole = searched(machine)
    for cut in (1, 5, len(whole.trials) - 3):
        again = SettingSearch(SETTINGS, WORST, machine.predict, TuningBudget())
        for trial in whole.trials[:cut]:
            again.add(trial)
        asked = again.next()
        assert asked is not None
        following = whole.trials[cut]
        assert (again.values_of(asked.choice), asked.phase) == (following.values, following.phase)


def test_what_holds_as_much_as_something_that_did_not_fit_is_not_tried() -> None:
    machine = PlayedMachine(0)
    search = SettingSearch(SETTINGS, WORST, machine.predict, TuningBudget())
    search.add(machine.trial(search, WORST, Phase.BASELINE))
    full = (8, "selective", "auto", *WORST[3:])
    assert full in search.candidates(WORST)
    failed = Trial(
        number=1,
        phase=Phase.EXPLORE,
        values=search.values_of((4, "none", "auto", *WORST[3:])),
        failure=TrialFailure.MEMORY,
        took_seconds=5.0,
    )
    search.add(failed)
    held = machine.predict(full)
    assert held is not None and held.held_bytes > 68
    assert full not in search.candidates(WORST)


def test_what_the_rules_refuse_is_not_tried() -> None:
    machine = PlayedMachine(0)

    def predict(choice: Choice) -> PredictedStep | None:
        return None if choice[1] == "none" else machine.predict(choice)

    search = SettingSearch(SETTINGS, WORST, predict, TuningBudget())
    search.add(machine.trial(search, WORST, Phase.BASELINE))
    assert search.candidates(WORST)
    assert not any(choice[1] == "none" for choice in search.candidates(WORST))


def test_settings_that_cannot_run_are_replaced_by_those_that_can() -> None:
    too_large = (16, "none", *WORST[2:])
    outcome = searched(PlayedMachine(1), too_large).outcome()
    assert outcome.changed and outcome.reason == "the original settings cannot run"


def test_a_budget_that_ends_before_the_comparison_changes_nothing() -> None:
    search = searched(PlayedMachine(1), budget=TuningBudget(trials=40, seconds=35))
    assert len(search.trials) <= 4
    assert not search.outcome().changed


def test_a_budget_of_a_few_trials_is_still_spent_on_trying() -> None:
    search = searched(PlayedMachine(1), budget=TuningBudget(trials=40, seconds=60))
    assert len({str(trial.values) for trial in search.trials}) >= 2
    assert searched(PlayedMachine(1), budget=TuningBudget(seconds=12)).outcome().reason == (
        "the budget was too small to try anything else"
    )


@pytest.mark.parametrize(("after", "faster"), [(0.5, True), (0.97, False), (1.0, False)])
def test_pairs_are_told_apart_beyond_noise_only(after: float, faster: bool) -> None:
    noise = (1.03, 0.97, 1.0, 1.02)
    found = compare([(each, after / each) for each in noise], 0.03**2)
    assert found.faster is faster
    assert found.low < found.speedup < found.high
