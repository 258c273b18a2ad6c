"""One message for all input columns of a table with cells that are not numbers, with settings to paste."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainrun.data.readers.tables.table_choice import TableChoice
from trainrun.data.readers.targets import DECIMAL_COMMA, is_missing, join_names, parse_cells
from trainrun.errors import DataError
from trainrun.plugin_faults import suggest_name

MOST_CATEGORIES, MOST_SHOWN, MOST_WORDS = 100, 20, 4
CATEGORIES = "data.train.categories"
FORMATTED_NUMBER = re.compile(r"[-+]?[$€£]?\s*\d[\d.,' ]*[$€£%]?")


class CellPosition(NamedTuple):
    """The row of a cell, counted from 0, and the line of the file on which the row ends."""

    row: int
    line: int


@dataclass
class ColumnProblems:
    """The cells of an input column that are not numbers. categories: the allowed words of a column of words."""

    name: str
    whole: bool  # whether the numbers must be whole
    categories: tuple[str, ...] | None = None
    flags: Sequence[str] = ()  # words that count as numbers
    num_numbers: int = 0
    num_words: int = 0
    num_missing: int = 0
    words: dict[str, CellPosition] = field(
        default_factory=dict
    )  # the different ones, where each appears first
    first_missing: CellPosition | None = None

    def add(self, cells: Sequence[str], lines: Sequence[int], first_row: int) -> None:
        """Count the cells of a block, whose rows begin at `first_row`."""
        for index, cell in enumerate(cells):
            word = cell.strip()
            if word in self.words:
                self.num_words += 1
                continue
            position = CellPosition(first_row + index, lines[index])
            if is_missing(word) if self.categories is None else not word:
                self.num_missing += 1
                self.first_missing = self.first_missing or position
            elif self.is_allowed(word):
                self.num_numbers += 1
            else:
                self.num_words += 1
                if len(self.words) <= MOST_CATEGORIES:
                    self.words[word] = position

    def is_allowed(self, word: str) -> bool:
        if self.categories is not None:
            return word in self.categories
        if word.lower() in self.flags:
            return True
        values = parse_cells([word])
        return values is not None and not (self.whole and values.dtype.kind == "f")

    @property
    def can_be_categories(self) -> bool:
        """Return whether the column has categories: more words than numbers, and few different words."""
        few = len(self.words) <= MOST_CATEGORIES
        return self.categories is None and self.num_words > self.num_numbers and few

    @property
    def has_formatted_numbers(self) -> bool:
        """Return whether most words are numbers with a currency, a percent sign or grouped digits, as '1.200,50 $'."""
        return self.categories is None and 2 * sum(
            map(bool, map(FORMATTED_NUMBER.fullmatch, self.words))
        ) > len(self.words)

    @property
    def number_format(self) -> str:
        """Return the format of the numbers of the column, if this is why they cannot be read; else ""."""
        if not self.has_formatted_numbers or parse_cells([self.first_word]) is not None:
            return ""
        return "a decimal comma" if any(map(DECIMAL_COMMA.fullmatch, self.words)) else "other signs"

    @property
    def first_word(self) -> str:
        return next(iter(self.words))


class InputFault(DataError):
    """The error for input columns of a table with cells that are not numbers.

    file: its name in messages.
    """

    def __init__(self, file: str, problems: Sequence[ColumnProblems], choice: TableChoice) -> None:
        self.file, self.problems = file, tuple(problems)
        self.inputs, self.fill = choice.inputs, choice.fill
        self.category_columns = [name for name, _ in choice.categories]
        ways = [self.training_settings(), *self.remedies()]
        super().__init__(self.describe(file, [way for way in ways if way]))

    def describe(self, file: str, ways: Sequence[str], by_rows: bool = False) -> str:
        """Return one line for each column, with advice. by_rows: name rows, counted from 0, instead of lines."""
        shown = [self.describe_column(problem, by_rows) for problem in self.problems[:MOST_SHOWN]]
        left = len(self.problems) - len(shown)
        rest = [f"and {left} more columns"] if left else []
        head = f"{file}: {len(self.problems)} of {len(self.inputs)} input columns cannot be used as they are"
        return "\n  ".join([head, *shown, *rest, *ways])

    def describe_column(self, problem: ColumnProblems, by_rows: bool) -> str:
        parts = []
        if problem.num_words:
            parts.append(self.describe_words(problem, by_rows))
        if problem.num_missing and self.fill is None:
            cells = "1 cell is" if problem.num_missing == 1 else f"{problem.num_missing} cells are"
            assert problem.first_missing is not None
            parts.append(f"{cells} missing (first in {format_position(problem.first_missing, by_rows)})")
        return f"column {problem.name!r}: {'; '.join(parts)}"

    def describe_words(self, problem: ColumnProblems, by_rows: bool) -> str:
        word = problem.first_word
        where = format_position(problem.words[word], by_rows)
        if problem.categories is not None:
            suggestion = suggest_name(word, problem.categories) or "."
            categories = join_names(problem.categories)
            return f"{word!r} in {where} is no category of the training data{suggestion} It has {categories}"
        if problem.number_format:
            cells = "number" if problem.num_words == 1 else "numbers"
            return f"{problem.num_words} {cells} with {problem.number_format} (first {word!r} in {where})"
        kind = "whole number" if problem.whole else "number"
        if not problem.can_be_categories and len(problem.words) <= MOST_CATEGORIES:
            if problem.num_words == 1:
                return f"{word!r} in {where} is not a {kind}"
            return f"{problem.num_words} cells are not {kind}s (first {word!r} in {where})"
        examples = join_names([repr(word) for word in problem.words][:MOST_WORDS])
        if len(problem.words) > MOST_CATEGORIES:
            return f"more than {MOST_CATEGORIES} different words ({examples}, ...)"
        count = len(problem.words)
        rest = ", ..." if count > MOST_WORDS else ""
        return f"{count} different {'words' if count > 1 else 'word'} ({examples}{rest}; first in {where})"

    def training_settings(self) -> str:
        """Return the settings with which the table can be used for training, ready to paste."""
        settings = []
        words = [problem for problem in self.problems if not problem.has_formatted_numbers]
        unusable = [problem.name for problem in words if len(problem.words) > MOST_CATEGORIES]
        left = [name for name in self.inputs if name not in unusable]
        if unusable and not left:
            return ""  # nothing helps
        if unusable:
            settings.append(f"data.train.inputs=[{','.join(left)}]")
        of_words = [problem.name for problem in words if problem.can_be_categories]
        if of_words:
            settings.append(f"{CATEGORIES}=[{','.join([*self.category_columns, *of_words])}]")
        if any(problem.num_missing for problem in self.problems) and self.fill is None:
            settings.append("data.train.fill=0")
        if not settings:
            return ""
        quoted = " ".join(f"'{setting}'" if " " in setting else setting for setting in settings)
        return f"Add these settings: {quoted}"

    def remedies(self) -> Iterable[str]:
        """Yield the changes to the file that no setting can replace."""
        if any(problem.categories is not None and problem.num_words for problem in self.problems):
            yield (
                "Correct the unknown words, or add rows with them to the training data. "
                "With data.train.fill=0 an empty cell is none of the words."
            )
        formatted = [problem for problem in self.problems if problem.number_format]
        if formatted:
            yield describe_number_formats(formatted)
        others = [problem for problem in self.problems if problem.num_words and problem not in formatted]
        if len(others) == len(self.inputs) and all(len(column.words) > MOST_CATEGORIES for column in others):
            yield (
                f"No input is left: every column holds more than {MOST_CATEGORIES} different words. "
                "Add columns of numbers, or of fewer words."
            )
        elif any(
            problem.categories is None and (not problem.can_be_categories or problem.has_formatted_numbers)
            for problem in others
        ):
            yield "Correct the cells that are not numbers, or leave their columns out (data.train.inputs)."


def describe_number_formats(problems: Sequence[ColumnProblems]) -> str:
    """Return how to write numbers in columns that have signs which are not allowed in a number."""
    names = join_names([problem.name for problem in problems], MOST_WORDS)
    words = [word for column in problems for word in column.words if FORMATTED_NUMBER.fullmatch(word)]
    comma = next((word for word in words if DECIMAL_COMMA.fullmatch(word)), None)
    if comma is not None:
        style = f"decimal commas, as {comma!r}; write points, as {comma.replace(',', '.')}"
    else:
        style = f"other signs, as {words[0]!r}; write digits and a point, as 1200.5"
    return f"The numbers of {names} have {style}."


def adapt_choice(choice: TableChoice, fault: InputFault) -> TableChoice:
    """Return a choice that fits the columns: words become categories, and gaps get an input of their own.

    Columns of too many words are left out. Raise InputFault for columns whose cells have to be corrected.
    """
    words = [problem for problem in fault.problems if not problem.has_formatted_numbers]
    dropped = [problem.name for problem in words if len(problem.words) > MOST_CATEGORIES]
    of_words = [problem.name for problem in words if problem.can_be_categories]
    others = [problem for problem in fault.problems if problem.name not in (*dropped, *of_words)]
    wrong = [problem for problem in others if problem.num_words]
    if wrong or len(dropped) == len(choice.inputs):
        raise InputFault(fault.file, wrong or fault.problems, choice) from None
    return choice._replace(
        inputs=tuple(name for name in choice.inputs if name not in dropped),
        categories=(*choice.categories, *((name, ()) for name in of_words)),
        gaps=(*choice.gaps, *(problem.name for problem in others)),
    )


def format_position(position: CellPosition, by_rows: bool) -> str:
    return f"row {position.row}" if by_rows else f"line {position.line}"
