"""The learning curves and their requirements. Standard library only."""

from dataclasses import dataclass

LEAST_LIFT = 0.20  # of held-out accuracy, for every algorithm and seed
MOST_LIFT_SHUFFLED = 0.08  # tolerance with shuffled answers
MOST_TOKENS = 0.70  # of those that a run without curriculum generates until the same accuracy


MIXTURE = {"fair": 1, "easy": 3, "hopeless": 3}
"""Sources of the mixture, with their weights."""


@dataclass(frozen=True)
class Case:
    """Settings of a run file, with one curve per seed."""

    name: str
    group: str
    """Cases of a group share a picture."""
    settings: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    shuffled: bool = False
    """Answers are shuffled among the problems: rewards are as frequent, but carry no information."""
    mixture: bool = False
    """Thirds of the training problems: as they are, with a reward that is always earned, and with one that never is."""
    control: str = ""
    """Case whose final accuracy must be reached with at most `MOST_TOKENS` of its tokens, for each seed."""
    least: float | None = LEAST_LIFT
    most: float | None = None
    sft: bool = False
    """Supervised fine-tuning of the untrained model, in place of a run from the warmed-up one."""
    teacher: str = ""
    """The case whose first seed's model teaches; it comes before."""
    share: float = 0.0
    """Least part of its teacher's lift."""

    def holds(self, lift: float, of_teacher: float = 0.0) -> bool:
        """Return whether a run's lift (final − first held-out accuracy, −1 to 1) meets the requirement."""
        least = self.share * of_teacher if self.teacher else self.least
        return (least is None or lift >= least) and (self.most is None or lift <= self.most)


def algorithm(name: str, *settings: str) -> Case:
    return Case(name, "algorithms", (f"trainer.algorithm={name}", *settings))


def staleness(lag: int, corrected: bool) -> Case:
    """GRPO with the ratio to the trainer's own policy; staleness is corrected by `tis`, or not at all."""
    name = f"lag {lag}, {'corrected' if corrected else 'uncorrected'}"
    correction = "tis" if corrected else "none"
    settings = (
        "trainer.algorithm=grpo",
        f"run.max_staleness={lag}",
        "trainer.algorithm.old_log_probs=recompute",
        f"trainer.algorithm.correction={correction}",
    )
    return Case(name, "staleness", settings)


# A third of its teacher's steps. Each token has a signal, so larger steps of smaller batches pay.
DISTILLED = (
    *("trainer.distillation.coefficient=1", "trainer.algorithm.old_log_probs=recompute", "run.max_steps=36"),
    *("trainer.mini_batches=8", "trainer.epochs=2", "trainer.learning_rate=5e-4", "trainer.schedule=linear"),
    *("trainer.min_learning_rate_ratio=0.05", "trainer.evaluation.interval=12"),
)


def mixture(name: str, *settings: str, control: str = "") -> Case:
    """GRPO on the mixture, evaluated every four steps."""
    shared = (
        "trainer.algorithm=grpo",
        "trainer.evaluation.interval=4",
        'reward.functions=["tests/learning/curve_rewards.py:any_answer"]',
    )
    return Case(name, "curriculum", (*shared, *settings), mixture=True, control=control, least=None)


CASES = (
    algorithm("grpo"),
    algorithm("dapo"),
    algorithm("rloo"),
    algorithm("reinforce_pp_baseline"),
    # GSPO's clip is nearly a thousand times narrower than GRPO's: to the rollout's policy, a step of this learning rate
    # away, the ratio of most completions would be outside of it, whatever they deserve. To the trainer's own it is 1.
    algorithm("gspo", "trainer.algorithm.old_log_probs=recompute"),
    algorithm("ppo"),
    Case("shuffled", "control", ("trainer.algorithm=grpo",), shuffled=True, least=None, most=MOST_LIFT_SHUFFLED),
    *(staleness(lag, corrected) for lag in (0, 1, 4) for corrected in (True, False)),
    mixture("mixture"),
    mixture(
        "mixture, curriculum",
        "run.curriculum={by='source', window=4, solved_above=0.95, hopeless_below=0.02, floor=0.02}",
        control="mixture",
    ),
    Case(
        "gspo, ratio to rollout",
        "remarks",
        ("trainer.algorithm=gspo", "trainer.algorithm.old_log_probs=rollout"),
        seeds=(1,),
        least=None,
    ),
    Case("ppo, value head", "remarks", ("trainer.algorithm=ppo", "trainer.algorithm.critic.form=head"), seeds=(1,)),
    Case("teacher", "distillation", ("trainer.algorithm=grpo", "run.max_steps=110"), seeds=(1,)),
    Case("distillation", "distillation", DISTILLED, teacher="teacher", share=0.9),
    Case(
        "untrained teacher",
        "distillation",
        (*DISTILLED, "trainer.reference.model=.quartet/arithmetic/model"),
        seeds=(1,),
        least=None,
        most=MOST_LIFT_SHUFFLED,
    ),
    Case("sft", "sft", (), sft=True, least=0.5),
    Case(
        "sft, shuffled",
        "sft",
        ("sft.data=examples/arithmetic/rows.py:shuffled",),
        seeds=(1,),
        sft=True,
        least=None,
        most=MOST_LIFT_SHUFFLED,
    ),
    Case("grpo, vLLM", "engine", ("trainer.algorithm=grpo", "rollout.engine=vllm"), seeds=(1,)),
)


def schedule(cases: tuple[Case, ...]) -> list[tuple[Case, int]]:
    """Return (case, seed) pairs, the first seed of every case before any second seed."""
    most = max(len(case.seeds) for case in cases)
    return [(case, case.seeds[place]) for place in range(most) for case in cases if place < len(case.seeds)]
