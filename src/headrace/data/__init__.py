"""Prompts: where they come from, the order they are drawn in, and the exactly-once ledger."""

from headrace.data.building import PromptTokenizer, RowTasks
from headrace.data.ledger import Ledger, LedgerCounts
from headrace.data.prompts import LoadReport, load_prompts
from headrace.data.settling import Settling
from headrace.data.stream import Draw, PromptStream

__all__ = [
    "Draw",
    "Ledger",
    "LedgerCounts",
    "LoadReport",
    "PromptStream",
    "PromptTokenizer",
    "RowTasks",
    "Settling",
    "load_prompts",
]
