"""Every mutation applies and names tests that exist; `make mutations` tries them."""

import subprocess
from pathlib import Path

import pytest
from patches import Mutation, read_mutations

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", read_mutations([]), ids=lambda mutation: mutation.name)
def test_a_mutation_applies_to_one_file_of_the_product_and_names_tests_that_exist(mutation: Mutation):
    assert mutation.what, "its first line says what is wrong with it"
    assert len(mutation.files) == 1 and "tests" not in Path(mutation.files[0]).parts
    assert mutation.tests and all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests)
    check = subprocess.run(["git", "apply", "--check", mutation.path], cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
