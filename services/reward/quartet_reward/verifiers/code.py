"""The verifier `code`: runs a completion's program against the reference's tests, in the sandbox."""

from dataclasses import replace

from pydantic import Field, model_validator
from quartet.v1 import reward_pb2

from quartet_reward.begun import admitted
from quartet_reward.code import judged
from quartet_reward.code.completion import ProgramIn, find_program
from quartet_reward.code.judged import Outcome
from quartet_reward.code.tests import OutputCases, Rules, TestProgram, Tests, read_tests
from quartet_reward.errors import VerifierFailure
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.verifiers.base import CompletionParameters, Tools, Verdict

_LARGEST_PROGRAM = 1 << 20


class CodeParameters(Rules, CompletionParameters):
    correct_reward: float = Field(1.0, description="Reward of a program that passes every test.")
    wrong_reward: float = Field(0.0, description="Reward of a program that fails a test.")
    error_reward: float = Field(0.0, description="Reward of a program that raises or exceeds a limit.")
    compile_error_reward: float = Field(0.0, description="Reward of a program that does not compile.")
    program_in: ProgramIn = Field(
        ProgramIn.FOUND, description="Where the program is in the completion, see docs/code.md."
    )

    @model_validator(mode="after")
    def _one_comparison(self) -> "CodeParameters":
        if self.checker and (self.tolerance or self.compare == "lenient"):
            other = "tolerance" if self.tolerance else "compare = 'lenient'"
            raise ValueError(f"a checker decides alone; got {other} with it")
        return self


class Code:
    name = "code"
    description = "The completion's Python program passes the reference's tests, run in the sandbox."
    parameters = CodeParameters
    reads = ("test_cases", "test_program")

    async def verify(self, item: reward_pb2.ScoreItem, parameters: CodeParameters, tools: Tools) -> Verdict:
        tests = read_tests(item.reference)
        completion = parameters.completion_of(item)
        found = find_program(completion, parameters.program_in, item.prompt, parameters.prefix, parameters.markers)
        if found is None:
            return _verdict(Outcome(reward_pb2.OUTCOME_MALFORMED, "no program in the completion"), "", parameters)
        program = found.source
        source = parameters.prefix + program
        if len(source) > _LARGEST_PROGRAM:
            reason = f"the program has {len(source)} characters; {_LARGEST_PROGRAM} are allowed"
            return _verdict(Outcome(reward_pb2.OUTCOME_RESOURCE_EXCEEDED, reason), program, parameters)
        if "\0" in source:
            return _verdict(
                Outcome(reward_pb2.OUTCOME_COMPILE_ERROR, "the program has null characters"), program, parameters
            )
        if (sandbox := tools.sandbox) is None:
            raise VerifierFailure(reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE, "this service has no sandbox")

        await admitted()
        outcome = await _judge(sandbox, source, tests, parameters)
        if found.bare and outcome.outcome == reward_pb2.OUTCOME_COMPILE_ERROR:
            reason = f"no program in the completion, which is none itself: {outcome.reason}"
            return _verdict(Outcome(reward_pb2.OUTCOME_MALFORMED, reason), "", parameters)
        return _counted(_verdict(outcome, program, parameters), outcome, tests)


async def _judge(sandbox: Sandbox, source: str, tests: Tests, rules: Rules) -> Outcome:
    try:
        if isinstance(tests, OutputCases):
            return await judged.judge_outputs(sandbox, source, tests, rules)
        return await judged.judge(sandbox, source, tests, rules)
    except SandboxUnavailable as error:
        raise VerifierFailure(reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE, str(error)) from error


def _counted(verdict: Verdict, outcome: Outcome, tests: Tests) -> Verdict:
    """Return the verdict with the numbers of tests and of passed tests."""
    count = 1 if isinstance(tests, TestProgram) else len(tests.cases)
    if outcome.outcome == reward_pb2.OUTCOME_CORRECT:
        passed: int | None = count
    elif isinstance(tests, TestProgram) or outcome.outcome == reward_pb2.OUTCOME_COMPILE_ERROR:
        passed = 0
    else:
        passed = outcome.passed
    return replace(verdict, tests=count, tests_passed=passed)


def _verdict(outcome: Outcome, program: str, parameters: CodeParameters) -> Verdict:
    rewards = {
        reward_pb2.OUTCOME_CORRECT: parameters.correct_reward,
        reward_pb2.OUTCOME_INCORRECT: parameters.wrong_reward,
        reward_pb2.OUTCOME_MALFORMED: 0.0,
        reward_pb2.OUTCOME_COMPILE_ERROR: parameters.compile_error_reward,
    }
    return Verdict(
        rewards.get(outcome.outcome, parameters.error_reward),
        outcome.outcome,
        outcome.reason,
        program.strip(),
        format_acc=0.0 if outcome.outcome == reward_pb2.OUTCOME_MALFORMED else 1.0,
        ans_acc=1.0 if outcome.outcome == reward_pb2.OUTCOME_CORRECT else 0.0,
    )
