"""The run file's section `[sft]`: supervised fine-tuning, which the command converts rows for and the trainer runs."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from quartet_common.refusals import did_you_mean
from quartet_common.sections import Section
from quartet_common.sources import RowSource, as_table
from quartet_common.values import NAME

ROW_FORMS = ("messages", "completion", "text", "input_ids")
"""The field by which a row's form is known; a row has one of them."""
ROW_FIELDS = (*ROW_FORMS, "tools", "chat_template_kwargs", "prompt", "labels")


class SftSource(RowSource):
    """Supervised rows: a file or a function by `path`, or a dataset of the hub by `dataset`."""

    fields: dict[str, str] = Field(
        {},
        description='The column that each field of the rows is read from: { messages = "conversation" }; a dot goes '
        "into a column. Other columns are left out. Default: the columns have the fields' names.",
    )

    @field_validator("fields")
    @classmethod
    def _of_rows(cls, value: dict[str, str]) -> dict[str, str]:
        for field in value:
            if field not in ROW_FIELDS:
                raise ValueError(f"a row has no field '{field}'{did_you_mean(field, ROW_FIELDS)}")
        return value

    @property
    def is_lines(self) -> bool:
        """Whether it is a JSONL file whose rows are used as they stand."""
        return self.is_jsonl and not self.fields


AnySftSource = Annotated[SftSource, BeforeValidator(as_table, json_schema_input_type=str | SftSource)]
"""A source by its path alone, or with all its keys."""
_SetName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


class SftSection(Section):
    """[sft]: supervised fine-tuning by `quartet sft` (docs/sft.md). Learning rate, plugin and the like: [trainer]."""

    data: AnySftSource | None = Field(None, description="Source of the training rows; its path is enough.")
    evaluation: dict[_SetName, AnySftSource] = Field(
        {}, description="Sets of held-out rows, name = source, of which the loss is measured."
    )
    epochs: int = Field(
        1, ge=0, description="Passes over the training rows; 0: until run.max_steps, which may also end them early."
    )
    rows_per_step: int = Field(32, ge=1, le=1 << 16, description="Rows of an optimizer step, over all ranks.")
    max_tokens: int = Field(0, ge=0, lt=2**31, description="Most tokens of a row; 0: those that the model can read.")
    long_rows: Literal["refuse", "drop", "truncate"] = Field(
        "refuse", description="What happens to longer rows: they end the start, are left out, or lose their end."
    )
    assistant_turns: Literal["all", "last"] = Field(
        "all", description="Turns of a chat's assistant that are in the loss."
    )
    append_eos: bool = Field(
        True, description="End completions and texts with the tokenizer's end token. Chats: as the template has it."
    )
    shuffle: bool = Field(True, description="Use the rows in another order in each pass.")
    shuffle_seed: int = Field(42, ge=0, description="Seed of the orders.")

    def sources(self) -> list[tuple[str, SftSource]]:
        """Return the source of the training rows, then those of the evaluation sets, each with its key."""
        train = [("sft.data", self.data)] if self.data else []
        return train + [(f"sft.evaluation.{name}", source) for name, source in self.evaluation.items()]
