"""What is said of code in a user's file that raised."""

from quartet_common.python_file import describe


def test_causes_in_a_circle_are_described():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    try:
        raise one
    except ValueError as error:
        assert describe(error, __file__)["reason"] == "raised ValueError: one"


def test_arguments_of_an_exception_and_of_its_causes_are_cut_before_they_are_made_text():
    try:
        try:
            raise ValueError("y" * 10**6)
        except ValueError as error:
            raise KeyError("x" * 10**6, 7) from error
    except KeyError as error:
        what = describe(error, __file__)
        assert [len(str(each)) for each in (error.args[0], error.__cause__)] == [100_000] * 2
    assert what["reason"].startswith("raised KeyError: ('xxx") and what["reason"].endswith("x', 7)")
    assert what["place"].startswith(f"{__file__}:") and len(what["traceback"]) == 4000
