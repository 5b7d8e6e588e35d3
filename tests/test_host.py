"""A host's rounds with the toy policy: what is published when, what is taken from peers, what is left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from swarms import NODES, FakeClock, a_peer, accounted, toy_experiment, toy_host, toy_settings

from rl_swarm.experiment import Experiment, open_experiment
from rl_swarm.host import Host
from rl_swarm.plan import read_plans
from rl_swarm.policies.toy import ToyPolicy
from rl_swarm.prune import prune_rollouts
from rl_swarm.settings import Settings
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.tasks.arithmetic import Arithmetic
from rl_swarm.types import Question, Rollout, ScoredGroup, Step

ROOT = "experiments/trial/"
# Without a filter and with room for all, whatever was found is used: four groups of each peer.
EVERYTHING: dict[str, Any] = {"select": "uniform", "num_transplant_trees": 64}


class Swarm:
    """One host for each node, in lockstep or not, over one store in memory."""

    def __init__(self, nodes: Sequence[str] = NODES, **given: Any) -> None:
        self.settings: Settings = toy_settings(**given)
        self.experiment = toy_experiment(MemoryStore(), self.settings)
        self.hosts = {node: toy_host(self.experiment, [node], self.settings) for node in nodes}

    def play(self, step: Step, nodes: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
        """A step of these nodes, the others sleeping; returns their rows."""
        awake = [self.hosts[node] for node in nodes or self.hosts]
        shared = [host.share(step) for host in awake]
        rows: dict[str, dict[str, Any]] = {}
        for host, mine in zip(awake, shared, strict=True):
            rows |= host.learn(step, mine)
        return rows

    def files(self, prefix: str) -> list[str]:
        return [key.removeprefix(ROOT) for key in self.experiment.store.keys(ROOT + prefix)]

    def record(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.experiment.store.get(ROOT + key))
        return found


def logits(host: Host, node: str) -> list[float]:
    saved: list[float] = json.loads(host.policy.save(node, {}))["logits"]
    return saved


# What is published, and when


def test_published_by_stage_is_one_file_before_anyone_learns() -> None:
    swarm = Swarm(rollout_publish_frequency="stage")
    swarm.hosts["ada"].share(Step(0))
    assert swarm.files("rollouts/") == ["rollouts/round_0/stage_0/ada.json"]
    file = swarm.record("rollouts/round_0/stage_0/ada.json")
    assert list(file["rollouts"]) == list(file["questions"]) == ["0", "1", "2", "3"]
    assert all(len(group) == 4 for group in file["rollouts"].values())
    assert (file["peer_id"], file["run"], file["model"]) == ("ada", swarm.experiment.run, "toy")


def test_published_by_generation_is_a_file_for_each_question() -> None:
    swarm = Swarm(rollout_publish_frequency="generation", **EVERYTHING)
    swarm.hosts["ada"].share(Step(0))
    assert swarm.files("rollouts/") == [f"rollouts/round_0/stage_0/ada.{part}.json" for part in range(4)]
    for part in range(4):
        assert list(swarm.record(f"rollouts/round_0/stage_0/ada.{part}.json")["questions"]) == [str(part)]
    groups = [swarm.record(key)["rollouts"] for key in swarm.files("rollouts/")]
    answers = {tuple(rollout["response"] for rollout in group[str(part)]) for part, group in enumerate(groups)}
    assert len(answers) == 4, "each question is answered anew"
    assert swarm.play(Step(0), ["bob"])["bob"]["external_from"] == {"ada": 4}


def test_published_by_round_is_one_file_after_the_update_for_use_in_the_next_round() -> None:
    swarm = Swarm(rollout_publish_frequency="round", **EVERYTHING)
    shared = swarm.hosts["ada"].share(Step(0))
    assert swarm.files("rollouts/") == []
    row = swarm.hosts["ada"].learn(Step(0), shared)["ada"]
    assert swarm.files("rollouts/") == ["rollouts/round_0/stage_0/ada.json"]
    assert (row["external_used"], row["external_missing"]) == (0, {"not_published": 64})
    later = swarm.play(Step(1), ["bob"])["bob"]
    assert (later["external_from"], later["external_age"]) == ({"ada": 4}, 1.0)


def test_without_sharing_files_are_published_all_the_same_for_others_to_use() -> None:
    swarm = Swarm(num_transplant_trees=0)
    swarm.play(Step(0))
    assert len(swarm.files("rollouts/")) == 3


# What is taken from peers


@pytest.mark.parametrize("wanted", [0, 1, 3, 64])
@pytest.mark.parametrize("select", ["informative", "uniform"])
def test_every_row_says_what_became_of_each_wanted_group(wanted: int, select: str) -> None:
    swarm = Swarm(num_transplant_trees=wanted, select=select, num_generations=8)
    for round in range(4):
        for node, row in swarm.play(Step(round)).items():
            assert row["external_wanted"] == wanted and accounted(row)
            assert row["external_used"] == sum(row["external_from"].values()) <= min(wanted, 8)
            assert node not in row["external_from"] and set(row["external_from"]) <= set(NODES)
            assert all(count > 0 for count in row["external_missing"].values())
            if select == "informative":
                assert row["external_used"] == min(wanted, row["informative_external"])


def test_the_control_without_a_filter_fills_all_it_wants() -> None:
    rows = Swarm(select="uniform", num_transplant_trees=8).play(Step(0)).values()
    assert all(row["external_used"] == 8 and row["external_missing"] == {} for row in rows)
    assert any(row["informative_external"] < 8 for row in rows)


def test_sharing_changes_what_is_learned() -> None:
    alone, sharing = Swarm(num_transplant_trees=0), Swarm(num_transplant_trees=8, num_generations=4)
    used = {node: row["external_used"] for node, row in sharing.play(Step(0)).items()}
    alone.play(Step(0))
    assert max(used.values()) > 0
    for node in NODES:
        same = logits(alone.hosts[node], node) == logits(sharing.hosts[node], node)
        assert same == (used[node] == 0), node
    assert swarm_files(alone) == swarm_files(sharing), "the first share comes before any learning"


def swarm_files(swarm: Swarm) -> list[dict[str, Any]]:
    return [{**swarm.record(key), "run": ""} for key in swarm.files("rollouts/")]


def test_training_uses_own_and_chosen_groups_together() -> None:
    swarm = Swarm(num_transplant_trees=64, num_generations=8)
    for row in swarm.play(Step(0)).values():
        assert row["trained_tokens"] == (4 + row["external_used"]) * 8
        assert row["generated_tokens"] == 4 * 8


RIGHT, WRONG = Rollout("<answer>1</answer>"), Rollout("no idea")
RIGHT_CUT, WRONG_CUT = replace(RIGHT, truncated=True), replace(WRONG, truncated=True)


class Writing(ToyPolicy):
    """Gives these answers to every question, and keeps what it learns from."""

    def __init__(self, node: str, *answers: Rollout) -> None:
        super().__init__([node], 0.5)
        self._answers = answers
        self.learned: list[ScoredGroup] = []

    def generate(
        self,
        questions: Mapping[str, Sequence[Question]],
        group_size: int,
        seeds: Mapping[str, int],
        *,
        greedy: bool = False,
    ) -> dict[str, list[tuple[Rollout, ...]]]:
        return {node: [self._answers] * len(asked) for node, asked in questions.items()}

    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        self.learned = [scored for groups in batches.values() for scored in groups]
        return super().update(batches)


class OneIsRight(Arithmetic):
    def score(self, question: Question, text: str) -> float:
        return float(text == RIGHT.text)


def learn_from_each_other(settings: Settings, *answers: Rollout) -> tuple[dict[str, Any], list[ScoredGroup]]:
    """A round of two nodes with these answers: the row of the first, and what it learned from."""
    experiment = toy_experiment(MemoryStore(), settings)
    policies = [Writing(node, *answers) for node in ("ada", "bob")]
    hosts = [
        Host(experiment, [node], OneIsRight(), policy, settings)
        for node, policy in zip(("ada", "bob"), policies, strict=True)
    ]
    shared = [host.share(Step(0)) for host in hosts]
    return hosts[0].learn(Step(0), shared[0])["ada"], policies[0].learned


@pytest.mark.parametrize(
    ("rule", "rewards", "left_out"),
    [("score", (1, 1, 0, 0), ()), ("zero", (0, 1, 0, 0), ()), ("leave_out", (1, 1, 0, 0), (0, 3))],
)
def test_cut_off_completions_are_treated_alike_in_own_and_in_peers_groups(
    rule: str, rewards: tuple[float, ...], left_out: tuple[int, ...]
) -> None:
    chosen = toy_settings(truncated_completions=rule, **EVERYTHING)
    row, learned = learn_from_each_other(chosen, RIGHT_CUT, RIGHT, WRONG, WRONG_CUT)
    assert row["truncated"] == 0.5 and row["my_reward"] == sum(rewards) / 4
    assert Counter(scored.group.node for scored in learned) == {"ada": 4, "bob": 4}
    for scored in learned:
        assert scored.rewards == rewards, scored.group.node
        assert scored.left_out == frozenset(left_out), scored.group.node


@pytest.mark.parametrize(("rule", "used"), [("score", 4), ("zero", 4), ("leave_out", 0)])
def test_a_peers_group_that_differs_only_in_what_is_left_out_is_not_chosen(rule: str, used: int) -> None:
    chosen = toy_settings(truncated_completions=rule, num_transplant_trees=64)
    row, _ = learn_from_each_other(chosen, RIGHT, RIGHT, RIGHT, WRONG_CUT)
    assert (row["informative_local"], row["external_used"]) == (used, used)


def test_a_peer_that_has_not_published_yet_is_read_from_the_round_before() -> None:
    swarm = Swarm(rollout_staleness=1, **EVERYTHING)
    swarm.play(Step(0))
    row = swarm.play(Step(1), ["ada", "bob"])["ada"]
    assert (row["external_from"], row["external_age"]) == ({"bob": 4, "cleo": 4}, 0.5)
    later = swarm.play(Step(2), ["ada", "bob"])["ada"]
    assert (later["external_from"], later["external_age"]) == ({"bob": 4}, 0.0), "cleo's round 0 is too old now"


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_nothing_older_than_the_window_is_used(staleness: int) -> None:
    swarm = Swarm(rollout_staleness=staleness, **EVERYTHING)
    swarm.play(Step(0), ["bob", "cleo"])
    for round in range(1, 5):
        row = swarm.play(Step(round), ["ada"])["ada"]
        assert row["external_from"] == ({"bob": 4, "cleo": 4} if round <= staleness else {})
        assert row["external_age"] == (round if round <= staleness else 0)


def test_where_there_is_no_common_clock_the_newest_step_of_each_peer_is_read() -> None:
    swarm = Swarm(rollout_staleness=0, **EVERYTHING)
    for round in range(3):
        swarm.play(Step(round), ["bob"])
    swarm.play(Step(0), ["cleo"])
    swarm.hosts["stranger"] = toy_host(swarm.experiment, ["stranger"], swarm.settings)
    swarm.play(Step(2), ["stranger"])
    host = swarm.hosts["ada"]
    newest = {"bob": Step(2), "cleo": Step(0), "ada": Step(0)}
    row = host.learn(Step(1), host.share(Step(1)), newest)["ada"]
    assert row["external_from"] == {"bob": 4, "cleo": 4}
    plan = read_plans(swarm.experiment, "ada")[Step(1)]
    assert {(name.node, name.step) for name in plan.names} == {("bob", Step(2)), ("cleo", Step(0))}


def test_no_more_peers_are_read_than_allowed_and_over_time_everyone_is() -> None:
    peers = [f"peer_{number}" for number in range(6)]
    swarm = Swarm(["ada", *peers], fetch_max_peers=2, **EVERYTHING)
    pairs = set()
    for round in range(20):
        row = swarm.play(Step(round))["ada"]
        assert len(row["external_from"]) == 2 and row["external_used"] == 8
        pairs.add(tuple(row["external_from"]))
    assert {peer for pair in pairs for peer in pair} == set(peers), "not the same two for ever"
    assert len(pairs) > 6


def test_the_groups_chosen_lie_elsewhere_in_every_round() -> None:
    swarm = Swarm(select="uniform", num_transplant_trees=1)
    for round in range(40):
        swarm.play(Step(round))
    for node in NODES:
        slots = Counter(
            (name.node, name.id) for plan in read_plans(swarm.experiment, node).values() for name in plan.names
        )
        assert slots.total() == 40
        assert len(slots) == 8 and max(slots.values()) < 15, f"eight slots to choose from: {slots}"


class TiringTimer(FakeClock):
    """Every look at it takes as long as reading from a slow share."""

    def __call__(self) -> float:
        self.advance(10.0)
        return super().__call__()


def test_reading_stops_when_its_time_is_over_and_says_so() -> None:
    swarm = Swarm(["ada", *(f"peer_{number}" for number in range(6))], fetch_timeout_seconds=120.0, **EVERYTHING)
    ada = swarm.hosts["ada"]
    slow = Host(swarm.experiment, ["ada"], ada.task, ada.policy, swarm.settings, FakeClock(), TiringTimer())
    swarm.play(Step(0), [node for node in swarm.hosts if node != "ada"])
    row = slow.learn(Step(0), slow.share(Step(0)))["ada"]
    assert row["rejected"]["timeout"] >= 3 and accounted(row)
    assert row["external_from"]["peer_0"] == 4 and not {"peer_4", "peer_5"} & set(row["external_from"])


def test_a_file_that_is_listed_but_not_there_yet_is_read_when_it_is() -> None:
    class Vanishing(MemoryStore):
        hidden = ""

        def get(self, key: str, limit: int | None = None) -> bytes:
            return super().get(key if key != self.hidden else f"{key}.not.there", limit)

    settings = toy_settings(**EVERYTHING)
    store = Vanishing()
    experiment = toy_experiment(store, settings)
    ada, bob = (toy_host(experiment, [node], settings) for node in ("ada", "bob"))
    bob.share(Step(0))
    mine = ada.share(Step(0))
    store.hidden = f"{ROOT}rollouts/round_0/stage_0/bob.json"
    row = ada.learn(Step(0), mine)["ada"]
    assert row["rejected"] == {"not_visible": 1} and row["external_used"] == 0 and accounted(row)
    store.hidden = ""
    assert ada.learn(Step(1), ada.share(Step(1)))["ada"]["external_from"] == {"bob": 4}


@pytest.mark.parametrize("cache", [True, False])
def test_a_file_is_read_once_with_a_cache_and_the_rows_are_the_same_without(cache: bool) -> None:
    class Counting(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.reads: Counter[str] = Counter()

        def get(self, key: str, limit: int | None = None) -> bytes:
            self.reads[key] += 1
            return super().get(key, limit)

    settings = toy_settings(cache_rollouts=cache, num_transplant_trees=8)
    store = Counting()
    experiment = toy_experiment(store, settings)
    host, other = toy_host(experiment, ["ada", "bob"], settings), toy_host(experiment, ["cleo"], settings)
    other.share(Step(0))
    rows = host.learn(Step(0), host.share(Step(0)))
    assert store.reads[f"{ROOT}rollouts/round_0/stage_0/cleo.json"] == (1 if cache else 2)
    expected = Swarm(num_transplant_trees=8).play(Step(0))
    assert all(rows[node]["external_from"] == expected[node]["external_from"] for node in rows)


# What is left behind


def test_rewards_votes_and_rows_agree() -> None:
    swarm = Swarm(num_generations=8, num_transplant_trees=64)
    rows = swarm.play(Step(0))
    for node, row in rows.items():
        assert swarm.record(f"rewards/round_0/stage_0/{node}.json") == {
            "round": 0, "stage": 0, "reward": row["my_reward"], "peer_id": node, "submitted_at": 0.0
        }  # fmt: skip
        vote = swarm.record(f"winners/round_0/{node}.json")
        assert vote["mean_rewards"] == {peer: pytest.approx(rows[peer]["my_reward"]) for peer in NODES}
        assert vote["winner"] == max(NODES, key=lambda peer: rows[peer]["my_reward"])
        assert swarm.experiment.metrics(node).rows == [row]
        assert 0 <= row["my_reward"] <= 1 and 0 <= row["train_reward"] <= 1


def test_a_row_has_every_documented_column() -> None:
    row = Swarm(eval_every=1).play(Step(0))["ada"]
    documented = (
        "timestamp round stage node_id experiment my_reward train_reward eval_reward informative_local "
        "informative_external external_wanted external_used external_missing rejected loss grad_norm entropy "
        "clip_fraction logprob_gap generated_tokens trained_tokens seconds"
    )
    assert set(documented.split()) <= set(row)
    assert set(row["seconds"]) == {"generate", "publish", "gather", "update", "evaluate"}


def test_my_reward_is_the_mean_over_own_completions_by_own_scoring() -> None:
    swarm = Swarm(num_transplant_trees=0)
    row = swarm.play(Step(0), ["ada"])["ada"]
    file = swarm.record("rollouts/round_0/stage_0/ada.json")
    rewards = [rollout["reward"] for group in file["rollouts"].values() for rollout in group]
    assert row["my_reward"] == row["train_reward"] == pytest.approx(sum(rewards) / 16)
    assert row["informative_local"] == sum(len({r["reward"] for r in group}) > 1 for group in file["rollouts"].values())


def test_doing_a_step_again_writes_nothing_twice_and_learns_the_same() -> None:
    swarm, single = Swarm(num_generations=8), Swarm(num_generations=8)
    single.play(Step(0))
    swarm.play(Step(0))
    before = {key: swarm.experiment.store.get(key) for key in swarm.experiment.store.keys("")}
    # As after a kill: new hosts know only what is in the store.
    swarm.hosts = {node: toy_host(swarm.experiment, [node], swarm.settings) for node in NODES}
    assert swarm.play(Step(0)) == {}, "who has finished a step sits it out"
    for node in NODES:
        assert swarm.hosts[node].replay(Step(0), [node]) == 0
    assert {key: swarm.experiment.store.get(key) for key in swarm.experiment.store.keys("")} == before
    for node in NODES:
        assert logits(swarm.hosts[node], node) == logits(single.hosts[node], node)


class KilledInTheUpdate(ToyPolicy):
    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        raise KeyboardInterrupt


def test_a_node_killed_between_choosing_and_learning_keeps_to_its_choice() -> None:
    swarm, undisturbed = (Swarm(select="uniform", num_transplant_trees=3) for _ in range(2))
    for each in (swarm, undisturbed):
        each.hosts["bob"].share(Step(0))
    ada = swarm.hosts["ada"]
    killed = Host(swarm.experiment, ["ada"], ada.task, KilledInTheUpdate(["ada"], 0.5), swarm.settings)
    with pytest.raises(KeyboardInterrupt):
        killed.learn(Step(0), killed.share(Step(0)))
    swarm.hosts["cleo"].share(Step(0))  # by now there is more to choose from
    swarm.hosts["ada"] = toy_host(swarm.experiment, ["ada"], swarm.settings)
    row, expected = (each.play(Step(0), ["ada"])["ada"] for each in (swarm, undisturbed))
    assert row == {**expected, "run": row["run"]} and row["external_from"] == {"bob": 3}
    assert logits(swarm.hosts["ada"], "ada") == logits(undisturbed.hosts["ada"], "ada")


def test_evaluation_comes_when_asked_and_leaves_training_alone() -> None:
    swarm, without = Swarm(eval_every=2, eval_questions=16, max_stages=2), Swarm(max_stages=2)
    for step in (Step(0), Step(0, 1), Step(1), Step(1, 1), Step(2), Step(2, 1), Step(3), Step(3, 1)):
        rows, others = swarm.play(step), without.play(step)
        for node, row in rows.items():
            assert ("eval_reward" in row) == (step in (Step(1, 1), Step(3, 1)))
            for name in ("eval_reward", "eval_reward_greedy"):
                assert 0 <= row.pop(name, 0.5) <= 1
            assert set(row.pop("eval_by_task", {})) <= {"arithmetic/bits", "arithmetic/gcd", "arithmetic/remainder"}
            assert row == {**others[node], "run": row["run"]}
    assert swarm_files(swarm) == swarm_files(without)


def test_nodes_of_one_host_answer_questions_of_their_own() -> None:
    swarm = Swarm()
    host = toy_host(swarm.experiment, NODES, swarm.settings)
    seeds = [scored.group.question.name.seed for groups in host.share(Step(0)).mine.values() for scored in groups]
    seeds += [scored.group.question.name.seed for groups in host.share(Step(1)).mine.values() for scored in groups]
    assert len(set(seeds)) == 2 * 3 * 4


# Retention


def rounds_of(swarm: Swarm, node: str, prefix: str = "rollouts/") -> list[int]:
    keys = [key for key in swarm.experiment.store.keys("") if f"/{prefix}" in key and key.endswith(f"/{node}.json")]
    return sorted(int(key.partition("round_")[2].partition("/")[0]) for key in keys)


RETENTION: dict[str, Any] = {"rollout_cleanup_enabled": True, "rollout_keep_last_n_rounds": 4, "checkpoint_interval": 1}


def aged(archive: bool = False, learned: dict[str, int] | None = None, left: str = "", **given: Any) -> Swarm:
    """Ada, with cleanup on, does eight rounds while the others publish; `learned` is how far they say they are."""
    swarm = Swarm(**{**RETENTION, "rollout_archive_old": archive, **given})
    others = toy_settings(num_transplant_trees=0)
    hosts = {node: toy_host(swarm.experiment, [node], others) for node in ("bob", "cleo")}
    for round in range(8):
        for node in NODES:
            done = round if learned is None else learned.get(node, round)
            peer = a_peer(swarm.experiment, node, learned=(done, 0), left=node == left)
            swarm.experiment.write_lease(swarm.experiment.peer_key(node), peer)
        for host in hosts.values():
            host.share(Step(round))
        swarm.play(Step(round), ["ada"])
    return swarm


def test_old_files_of_its_own_go_and_those_of_others_stay() -> None:
    swarm = aged()
    assert rounds_of(swarm, "ada") == [4, 5, 6, 7]
    assert rounds_of(swarm, "bob") == rounds_of(swarm, "cleo") == list(range(8))
    assert len(swarm.experiment.metrics("ada").rows) == 8
    assert list(swarm.experiment.store.keys("archives/")) == []


def test_archived_files_move_to_the_archive_unchanged() -> None:
    swarm, kept = aged(archive=True), aged(rollout_cleanup_enabled=False)
    assert rounds_of(swarm, "ada", "rollouts/") == list(range(8))
    assert list(swarm.experiment.store.keys("archives/")) == [
        f"archives/trial/rollouts/round_{round}/stage_0/ada.json" for round in range(4)
    ]
    assert rounds_of(kept, "ada") == list(range(8))
    archived = json.loads(swarm.experiment.store.get("archives/trial/rollouts/round_2/stage_0/ada.json"))
    original = kept.record("rollouts/round_2/stage_0/ada.json")
    assert {**archived, "run": ""} == {**original, "run": ""}


def test_without_cleanup_nothing_goes() -> None:
    assert rounds_of(aged(rollout_cleanup_enabled=False), "ada") == list(range(8))


def test_what_a_slow_peer_has_not_learned_from_stays() -> None:
    kept = rounds_of(aged(learned={"bob": 4}), "ada")
    assert kept == [1, 2, 3, 4, 5, 6, 7], "round 4, by staleness the one before, by its checkpoints two more"


def test_a_peer_that_left_holds_up_nothing() -> None:
    assert rounds_of(aged(learned={"bob": 0}, left="bob"), "ada") == [4, 5, 6, 7]


def test_a_peer_that_has_not_been_heard_of_for_ages_holds_up_nothing() -> None:
    swarm = Swarm(**RETENTION)
    for node, round in (("ada", 50), ("dead", 2)):
        peer = a_peer(swarm.experiment, node, learned=(round, 0))
        swarm.experiment.write_lease(swarm.experiment.peer_key(node), peer)
    for round in range(51):
        swarm.experiment.publish("ada", Step(round), None, 0.0, "toy", [])
    assert prune_rollouts(swarm.experiment, "ada", Step(20), swarm.settings) == 0
    assert prune_rollouts(swarm.experiment, "ada", Step(50), swarm.settings) == 47
    assert rounds_of(swarm, "ada") == [47, 48, 49, 50]


def test_what_a_restarted_peer_replays_from_its_checkpoint_stays() -> None:
    """From the one before its newest, which may not have been written yet when it was killed."""
    assert rounds_of(aged(rollout_keep_last_n_rounds=1, checkpoint_interval=2), "ada") == [2, 3, 4, 5, 6, 7]


# Experiments of the same name


def test_rollouts_of_an_earlier_run_are_never_used() -> None:
    old = Swarm(num_generations=8, num_transplant_trees=64)
    old.play(Step(0))
    store = old.experiment.store
    left_over = {key: store.get(key) for key in store.keys(ROOT + "rollouts/")}
    assert len(left_over) == 3
    old.experiment.delete()
    assert list(store.keys("")) == []
    anew = toy_experiment(store, old.settings)
    assert anew.run != old.experiment.run
    # Somebody's backup, or a drive that synchronises late, brings the old files back.
    for key, value in left_over.items():
        if not key.endswith("/ada.json"):
            store.put(key, value)
    host = toy_host(anew, ["ada"], old.settings)
    row = host.learn(Step(0), host.share(Step(0)))["ada"]
    assert row["rejected"] == {"wrong_run": 2} and row["external_used"] == 0 and accounted(row)


def test_a_copied_experiment_is_an_experiment_of_its_own_name() -> None:
    swarm = Swarm()
    swarm.play(Step(0))
    store = swarm.experiment.store
    for key in store.keys(ROOT):
        store.put(key.replace("/trial/", "/copy/", 1), store.get(key))
    copy: Experiment = open_experiment(store, "copy")
    assert copy.name == "copy"
    copy.delete()
    assert list(store.keys("experiments/copy/")) == []
    assert len(swarm.files("rollouts/")) == 3, "deleting a copy does not touch the original"
