"""The machine that drives two runs through the broker and through `model_reference` at once, and compares.

What a test of single transitions cannot see comes of the order here: late holders of leases, old trainers, answers that
were lost (calls made twice), groups put in another order, a clock that jumps, a Redis that lost the end of its log.
"""

import itertools

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_books import LEASE_TTL, MEMBER_TTL
from model_reference import Reference
from model_run import ROLLOUTS, Bench, Lease, Run
from quartet.v1 import broker_pb2 as pb
from world import World

from quartet_common.durations import to_duration

DAY = 86_400_000
AUDITED = 4  # of so many steps one is followed by an audit, which takes longer than a step

curricula = st.builds(
    pb.Curriculum,
    by=st.sampled_from([pb.CURRICULUM_UNIT_PROMPT, pb.CURRICULUM_UNIT_SOURCE]),
    window=st.integers(1, 3),
    solved_above=st.sampled_from([0.6, 0.99]),
    hopeless_below=st.sampled_from([0.0, 0.3]),
    floor=st.sampled_from([0.0, 0.5]),
)
specs = st.builds(
    pb.RunSpec,
    groups_per_step=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    max_deliveries=st.integers(1, 3),
    max_queued_prompts=st.sampled_from([12, 24, 100]),
    max_experience_bytes=st.sampled_from([600, 2500, 1 << 20]),
    lease_order=st.sampled_from([pb.LEASE_ORDER_FIFO, pb.LEASE_ORDER_FRESH_FIRST]),
    partial_batch=st.sampled_from([pb.PARTIAL_BATCH_POLICY_DROP, pb.PARTIAL_BATCH_POLICY_TRAIN]),
    prompt_lease_ttl=st.just(to_duration(LEASE_TTL / 1000)),
    member_ttl=st.just(to_duration(MEMBER_TTL / 1000)),
    curriculum=st.one_of(st.none(), curricula),
)
sides = st.sampled_from([0, 0, 0, 1])  # the second run is there to be left alone
twice = st.sampled_from([1, 1, 1, 2])  # the answer was lost: the call is made again
# Which of the leases ever granted, counted from the newest: most often one that may still be held.
picks = st.lists(st.integers(0, 24), min_size=1, max_size=6)
sizes = st.sampled_from([0, 50, 300, 900])
_numbers = itertools.count()


class BrokerMachine(RuleBasedStateMachine):
    """Two runs. Each rule is one call or a few; after each, all that stands in Redis is compared."""

    bench: Bench
    calm = False  # no rule is under way, and none failed

    @initialize(first=specs, second=specs, steps=st.integers(0, 3))
    def begin(self, first: pb.RunSpec, second: pb.RunSpec, steps: int) -> None:
        self.bench.reset_clock()
        self.sides: list[Run] = []
        for spec in (first, second):
            world = World(self.bench.stub, None, f"model-{next(_numbers)}")
            side = Run(self.bench, world, Reference(spec, self.bench.clock))
            self.sides.append(side)
            side.create()
            side.open(0)
        self.submit(0, [(n, 0) for n in range(12)], 1)
        self.a_few_steps(0, steps)
        self.submit(1, [(n, 0) for n in range(5)], 1)

    def teardown(self) -> None:
        """End of an example: nothing of it is left, and neither run was touched on the way."""
        if self.calm:
            for side in self.sides:
                side.compare()
        self.bench.redis.flushdb()

    @invariant()
    def both_agree(self) -> None:
        """Training was exactly once; every few steps, the broker's books are as the reference has them."""
        self.bench.steps += 1
        side = self.sides[self.touched]
        if self.bench.steps % AUDITED == 0:
            side.compare()
        side.check_training()
        self.calm = True

    def _side(self, number: int) -> Run:
        self.touched, self.calm = number, False
        return self.sides[number]

    # --- clients

    @rule(
        side=sides,
        names=st.lists(st.tuples(st.integers(0, 39), st.sampled_from([0] * 15 + [1])), min_size=1, max_size=10),
        times=twice,
    )
    def submit(self, side: int, names: list[tuple[int, int]], times: int) -> None:
        """Training prompts; some are there already, a few with another content."""
        self._side(side).submit([(f"p{n}", "TRAIN", content, None) for n, content in names], times=times)

    @rule(
        side=sides,
        numbers=st.lists(st.integers(0, 7), min_size=1, max_size=3),
        pinned=st.sampled_from([None, None, 0, 1]),
        times=twice,
    )
    def other_prompts(self, side: int, numbers: list[int], pinned: int | None, times: int) -> None:
        """Prompts of someone who wants the completions, some at a version."""
        self._side(side).submit([(f"s{n}", "SERVE", 0, pinned) for n in numbers], times)

    @rule(side=sides, what=st.sampled_from(["requeue"] * 5 + ["end"] * 2 + ["finish"]), times=twice)
    def rare_calls_of_clients(self, side: int, what: str, times: int) -> None:
        """Some of the dead, or all, are queued again; the prompts or the run end."""
        side = self._side(side)
        for _ in range(times):
            match what:
                case "requeue":
                    side.requeue_dead([])
                    side.requeue_dead([*sorted(side.model.dead)[::2], "p0", "p1"])
                case "end":
                    side.both(side.model.end_prompts, side.world.end_prompts())
                case "finish":
                    side.both(
                        lambda: side.model.finish("CANCELLED"),
                        side.world.finish(pb.RUN_STATE_CANCELLED),
                        lambda run: pb.RunState.Name(run.state).removeprefix("RUN_STATE_"),
                    )

    # --- members and time

    @rule(side=sides, name=st.sampled_from(ROLLOUTS), how=st.sampled_from(["beat"] * 4 + ["move", "leave"]))
    def member(self, side: int, name: str, how: str) -> None:
        """A rollout lives, comes anew at another address, or goes."""
        side = self._side(side)
        if how == "leave":
            side.both(lambda: side.model.leave(name), side.world.leave(name))
        elif how == "move":
            side.register(name, "there:2")
        elif name in side.model.members:
            side.heartbeat(name)
        else:
            side.register(name)

    @rule(by=st.sampled_from([1, 1000, -1, -1000, LEASE_TTL // 2, -LEASE_TTL, LEASE_TTL, MEMBER_TTL, -DAY, DAY]))
    def clock_jumps(self, by: int) -> None:
        """Redis' clock goes forward or back. Nothing is looked at: what was due is found out by whoever comes next."""
        self.touched = 0
        self.bench.set_clock(self.bench.clock.now + by)

    @rule(side=sides, off=st.sampled_from([-1, 0, 0, 1]), which=st.integers(0, 3))
    def clock_jumps_to_an_end(self, side: int, off: int, which: int) -> None:
        """To the millisecond at which a member ends, or beside it; then comes a sweep."""
        side = self._side(side)
        ends = list(side.model.members.values())
        if ends:
            self.bench.set_clock(sorted(ends)[which % len(ends)] + off)
            side.sweep()

    @rule(side=sides, which=st.integers(0, 5), off=st.sampled_from([-1, 0, 0, 1]), first=st.integers(0, 4))
    def last_moment_of_a_lease(self, side: int, which: int, off: int, first: int) -> None:
        """In the millisecond in which it ends, or beside it, come its holder, the sweep, and whoever has it next."""
        side = self._side(side)
        held = [lease for lease in side.leases if side.model.holds(lease.granted.lease_id)]
        held = held or side.granted(3, side.model.version)
        if not held:
            return
        lease = held[which % len(held)]
        name, lease_id = lease.granted.instance.instance_id, lease.granted.lease_id
        self.bench.set_clock(side.model.groups[name].expiry + off)
        acts = [
            lambda: side.renew([lease_id]),
            lambda: side.put([lease], 50),
            lambda: side.release([lease_id], "broken"),
            lambda: side.granted(2, side.model.version),
            lambda: side.sweep(),
        ]
        for act in acts[first:] + acts[:first]:
            act()
        side.compare()

    @rule(side=sides)
    def sweep(self, side: int) -> None:
        self._side(side).sweep()

    # --- rollouts

    @rule(side=sides, holder=st.sampled_from(ROLLOUTS), most=st.integers(1, 6), lag=st.integers(-1, 2))
    def lease(self, side: int, holder: str, most: int, lag: int) -> None:
        """Ask for prompts, with weights that may be behind."""
        side = self._side(side)
        side.feed()
        side.granted(most, max(-1, side.model.version - lag), holder)

    def _picked(self, side: Run, picked: list[int]) -> list[Lease]:
        """Leases of the past, in any order, some more than once; now and then one of the other run."""
        other = next(each for each in self.sides if each is not side)
        known = [*other.leases[-1:], *side.leases]
        return [known[-1 - n % len(known)] for n in picked] if known else []

    @rule(
        side=sides,
        picked=picks,
        size=sizes,
        mixed=st.sampled_from([0, 0, 0, 1]),
        swapped=st.sampled_from([False] * 7 + [True]),
        full=st.sampled_from([None] * 3 + [0, 1]),
        times=twice,
    )
    def put(
        self, side: int, picked: list[int], size: int, mixed: int, swapped: bool, full: int | None, times: int
    ) -> None:
        """Several groups at once, in any order: with tokens of two versions if `mixed`, each with another's lease if
        `swapped`, the first so large that all that is stored comes to the limit, or to a byte more (`full`)."""
        side = self._side(side)
        leases = self._picked(side, picked)
        if full is not None and leases:
            size = side.size_to(leases[0], side.model.spec.max_experience_bytes + full)
        for _ in range(times if leases else 0):
            side.put(leases, size, mixed, swapped)

    @rule(
        side=sides,
        most=st.integers(2, 6),
        lag=st.sampled_from([0, 0, 1, 2]),
        size=sizes,
        mixed=st.sampled_from([0, 0, 1]),
    )
    def generate(self, side: int, most: int, lag: int, size: int, mixed: int) -> None:
        """Ask, generate, put: what rollouts do; with tokens of two versions if `mixed`."""
        side = self._side(side)
        side.feed()
        leases = side.granted(most, max(0, side.model.version - lag))
        if leases:
            side.put(leases[::-1], size, mixed)

    @rule(
        side=sides,
        picked=picks,
        how=st.sampled_from(["renew", "renew", "", "broken", "for good", "for good"]),
        times=twice,
    )
    def renew_or_release(self, side: int, picked: list[int], how: str, times: int) -> None:
        """Leases that are held, and leases lost long ago, are renewed or given back."""
        side = self._side(side)
        ids = [lease.granted.lease_id for lease in self._picked(side, picked)]
        for _ in range(times):
            if how == "renew":
                side.renew(ids)
            else:
                side.release(ids, how)

    # --- the trainer

    @rule(side=sides, off=st.sampled_from([0, 0, 0, 0, -1, 1]))
    def lease_experience(self, side: int, off: int) -> None:
        """The step that is due, one again, or one too early."""
        side = self._side(side)
        side.take(max(0, side.due() + off))

    @rule(side=sides, off=st.sampled_from([0, 0, 1, -1]), numbers=st.lists(st.integers(0, 9), min_size=1), times=twice)
    def drop(self, side: int, off: int, numbers: list[int], times: int) -> None:
        """Groups without an advantage, and some that are not in the batch."""
        side = self._side(side)
        step = max(0, side.model.version + off)
        batch = side.model.batches.get(step) or ["p0"]
        names = [batch[n % len(batch)] for n in numbers[:2]] + [f"p{n}" for n in numbers[2:3]]
        for _ in range(times):
            side.drop(step, names)

    @rule(side=sides, really=st.sampled_from([False, False, True]), drop=st.booleans())
    def the_data_ends(self, side: int, really: bool, drop: bool) -> None:
        """No more prompts; what is left is worked off, and the last batch is short, or is made so."""
        side = self._side(side)
        if not really:
            return
        side.both(side.model.end_prompts, side.world.end_prompts())
        for _ in range(3):
            side.get_ready()
            batch = side.model.batches.get(side.model.version)
            if drop and batch:
                side.drop(side.model.version, batch[:1])
                side.take(side.due())
            side.mark(side.model.version)
            side.compare()

    @rule(side=sides, off=st.sampled_from([0, 0, 0, -1, 1]), times=twice)
    def mark_trained(self, side: int, off: int, times: int) -> None:
        """The step that is due, one that was marked, or one too early."""
        side = self._side(side)
        step = max(0, side.model.version + off)
        for _ in range(times):
            side.mark(step)

    @rule(side=sides, behind=st.integers(-1, 3), times=twice)
    def commit(self, side: int, behind: int, times: int) -> None:
        """A checkpoint became durable."""
        side = self._side(side)
        target = max(0, side.model.version - behind)
        for _ in range(times):
            side.commit(target)

    @rule(side=sides, back=st.integers(0, 3), tell=st.sampled_from(["ledger", "ledger", "ids", "nothing"]))
    def crash(self, side: int, back: int, tell: str) -> None:
        """The trainer starts again, from a durable checkpoint or from one that is too old; it may be an older build."""
        side = self._side(side)
        checkpoint = max(0, side.model.version - back)
        side.open(checkpoint, {"ledger": None, "ids": side.weights[:checkpoint], "nothing": []}[tell])

    @rule(side=sides, picked=st.integers(0, 5))
    def the_old_trainer_comes_back(self, side: int, picked: int) -> None:
        """Nothing it says counts."""
        side = self._side(side)
        old, step = side.old_sessions[-1 - picked % len(side.old_sessions)], side.model.version
        side.take(step, session=old)
        world, model = side.world, side.model
        side.both(lambda: model.mark_trained(old, step, []), world.trained(step, session=old))
        side.both(lambda: model.commit(old, step), world.commit(step, session=old))
        side.both(lambda: model.drop(old, step, ["p0"]), world.drop(step, "p0", session=old))

    # What a run does most of the time, so that the rest happens in the middle of a run: Hypothesis takes the rule whose
    # name comes first more often.
    @rule(side=sides, steps=st.integers(1, 3))
    def a_few_steps(self, side: int, steps: int) -> None:
        """Steps without any trouble."""
        side = self._side(side)
        for _ in range(steps):
            side.get_ready()
            side.mark(side.model.version)

    @rule(side=sides)
    def work_ahead(self, side: int) -> None:
        """Two batches at once, and the later one is said to be trained first."""
        side = self._side(side)
        side.get_ready()
        side.get_ready()
        side.mark(side.model.version + 1)

    # --- a Redis that forgets

    @rule(side=sides)
    def snapshot(self, side: int) -> None:
        """From here on, what follows may turn out not to have been on Redis' disk."""
        self._side(side).snapshot()

    @precondition(lambda self: any(side.pictures for side in self.sides))
    @rule(
        back=st.integers(0, 3),
        which=st.integers(0, 9),
        lives=st.booleans(),
        falls_after=st.sampled_from([None, None, 0, 1, 2]),
    )
    def redis_is_restored(self, back: int, which: int, lives: bool, falls_after: int | None) -> None:
        """Redis comes back as it was, the trainer from a checkpoint it has, rollouts with leases that never were."""
        self._side(0 if self.sides[0].pictures else 1).lose(back, which, lives, falls_after)

    @rule(side=sides, stage=st.integers(0, 4), back=st.sampled_from([0, 0, 1]))
    def redis_forgets_a_step(self, side: int, stage: int, back: int) -> None:
        """The last that is on its disk is the prompts, the leases, the ready groups, the batch, or the trained step."""
        side = self._side(side)
        if side.model.members.get("r1", 0) <= self.bench.clock.now:
            side.register("r1")
        side.feed()
        leases: list[Lease] = []
        for number, happens in enumerate(
            (
                lambda: leases.extend(side.granted(6, side.model.version)),
                lambda: side.put(leases, 50) if leases else None,
                lambda: side.take(side.due()),
                lambda: side.mark(side.model.version),
                lambda: None,
            )
        ):
            if number == stage:
                side.snapshot()
            happens()
        side.lose(back)
