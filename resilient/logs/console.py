"""Console output of training programs: any line that names a step and its loss, among everything else they print.

One scanner reads them all: it goes from number to number and asks what the words before each number mean (names.py). That
covers Megatron, nanoGPT, llm.c, modded-nanogpt, torchtitan, fairseq, Hugging Face, litgpt, nanotron, MaxText, verl, mmengine,
Lightning, Keras, tqdm bars and most of what people print themselves. Told apart on top of it:

- Which line is data. A line counts if it has a loss or a gradient norm, and if the same kind of line (same names of counter
  and loss) comes again: source code, configuration dumps and prose that mention a loss once are no data. The first line of
  a kind waits for its second and is dropped if other data comes first.
- Blocks: a line with only a counter, then one `name=value` a line (OLMo, Composer).
- Evaluations: by their names, by what stands before them on the line, or by the line itself.
- nanoGPT's `step N: train loss .., val loss ..` is an evaluation if there are `iter` lines, else also the training loss.
- Ranks: the first one that reports a loss is kept.
- Refused steps: Megatron's counts, DeepSpeed's OVERFLOW lines and `skipped=`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from resilient.logs.columns import Columns
from resilient.logs.names import EVALUATION_WORDS, Meaning, meaning_of, words_of
from resilient.logs.numbers import number as as_number
from resilient.logs.points import Point, Points, note
from resilient.logs.records import parse_object
from resilient.logs.rows import Remarks, Row

_ANSI = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|\x1b\][^\x07]*\x07")
_RANK = re.compile(
    r"\s*(?:\[(?:rank|default|worker|gpu|node|proc|local_rank)\s*[-_:=]?\s*(?P<a>\d+)\]\s*:?|(?:rank|worker|node)\s*[-_:]?\s*(?P<b>\d+)\s*[:|]"
    r"|\[\d+,(?P<c>\d+)\]<std(?:out|err)>:|\([\w.]+ (?:pid=\d+, ip=[\d.]+|pid=(?P<d>\d+))\))\s?",
    re.IGNORECASE,
)
_RANK_INSIDE = re.compile(r"\brank[ =:_]?(?P<rank>\d+)\b", re.IGNORECASE)
_SRUN = re.compile(r"\s*(\d{1,4}): ")
_NOT_WORD = (
    r"(?![A-Za-z_])(?!\s*(?:iter|step|loss|grad|value|detect|check|count|or\b|in\b|and\b))"  # `nan iterations: 0`
)
_NUMBER = re.compile(  # begins with a set of characters, which is what makes the search fast
    r"(?P<n>[-+.\dnNiI](?<![\w.].)(?:"
    r"(?<=\d)(?:\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.?\d*)(?:[eE][-+]?\d+)?"
    r"|(?<=[-+])(?:(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?:nan|NaN|NAN|[iI]nf(?:inity)?|INF)"
    + _NOT_WORD
    + r")|(?<=\.)\d+(?:[eE][-+]?\d+)?|(?<=[nN])(?:an|aN|AN)"
    + _NOT_WORD
    + r"|(?<=[iI])(?:nf|NF)(?:inity)?"
    + _NOT_WORD
    + r"))(?P<suffix>[KMBGT](?![A-Za-z]))?(?:\s*/\s*(?P<total>\d+)(?![\d.:/-]))?"
)
_MARKS = (
    "loss",
    "norm",
    "step",
    "iter",
    "epoch",
    "batch",
    "trl:",
    "tel:",
    "nll",
    "entropy",
    "%|",
    "update",
    "progress",
)
_EVALUATIONS = ("val", "test", "dev")
_EVALUATION = re.compile(r"(?<![\w./-])(?:val|valid|validation|validate|validating|eval|evals|evaluation|evaluating|evaluate|test|testing|dev)(?![\w/.-])", re.IGNORECASE)  # fmt: skip
_CODE = re.compile(r"^\s*(?:#|//|\"\"\"|import |from \w+ import |def |class |return |print\w*\(|if |for |while |else\b|elif |@|assert |parser\.|with |try:|except\b|args\.)")  # fmt: skip
_OPENERS = " \t:=([{'\"<>~≈→\u00a0"
_WRAPPER = re.compile(r"(?:\b(?:np|numpy|torch|jnp)\.)?(?:float\d*|int\d*|tensor|Array|array)$")
_HARD = re.compile(r"[|,;\t\[\](){}│┃•·]|\s[-\u2013\u2014>]+\s|\s{2,}|\.\s|'|\"|=>")
_UNITS = re.compile(r"^(?:ms|s|sec|secs|seconds|%|it/s|its|tok/s|tokens/s|gib|gb|mib|mb|m|k|b|h|min|tflops|tflop/s|x|z|it|toks/s)\b\s+", re.IGNORECASE)  # fmt: skip
_TRAILING_GROUP = re.compile(r"\s*\(([^()]{1,24})\)$")
_BAR = re.compile(r"(?P<desc>[^|]{0,80}?)\s*\d+%\|[^|]*\|\s*(?P<n>\d+)/(?P<total>\d+) \[")
_PROGRESS = re.compile(r"Progress on:\s*(?P<what>\w+)\s+(?P<n>[\d.]+)(?P<k>k?)it/")
_LLMC = re.compile(r"\s*s:(?P<n>\d+) (?=trl:|tel:|eval:)")
_PAIR = re.compile(
    r"^\s*(?:Train |Eval )?(?P<key>[A-Za-z_][^:=]{0,120}?)\s*[:=]\s*(?P<value>[-+]?[\w.,+-]{1,40}?)\s*(?:%|ms|s)?\s*$"
)
_TABLE_LINE = re.compile(r"\s*(?P<step>\d+) (?P<what>train|val|hella) (?P<value>\S+)\s*$")
_OPENMM = re.compile(
    r"(?:Epoch|Iter)\s*\((?P<what>train|val|test)\)\s*(?:\[\s*(?P<epoch>\d+)\])?\s*\[\s*(?P<n>\d+)/\s*(?P<total>\d+)\]"
)
_OVERFLOW = re.compile(r"overflow", re.IGNORECASE)
_REDUCED = re.compile(r"(?:reducing to|reducing loss scale to|setting loss scale to:?)\s*([\d.e+]+)", re.IGNORECASE)
_SKIPPED = re.compile(r"skipping step|ignoring gradient|skipped (?:a )?step|skipping (?:the )?(?:optimizer )?(?:update|step)", re.IGNORECASE)  # fmt: skip
_EPOCH_ONLY = re.compile(r"^\W*epoch\W*(\d+)\s*(?:/|of|\]|$|:)", re.IGNORECASE)
_NO_STEP_AFTER = frozenset({"per", "of", "skipped", "nan", "max", "total", "every", "warmup", "save", "remaining", "accumulation", "each", "eval", "logging", "last", "best", "num", "number", "n", "sec", "second", "s", "ms", "time", "avg", "steps", "until", "for", "in", "after", "gradient", "from", "to"})  # fmt: skip
_FORMATS = (
    (
        re.compile(
            r"consumed samples:|number of skipped iterations:|elapsed time per iteration \(ms\)|validation loss at iteration"
        ),
        "Megatron console",
    ),
    (re.compile(r"\bs:\d+ (?:trl|tel|eval):"), "llm.c log"),
    (re.compile(r"^step:\d+/\d+ (?:train|val)_loss:"), "modded-nanogpt log"),
    (re.compile(r"^iter \d+: loss|^step \d+: train loss [\d.naif]+, val loss"), "nanoGPT console"),
    (re.compile(r"train_inner|fairseq"), "fairseq console"),
    (re.compile(r"\[step=\d[\d,]*(?:/[\d,]+)?[,\]]"), "OLMo console"),
    (re.compile(r"\[Rank \d+\] step=|steps: \d+ loss: .* iter time|\[deepspeed\]"), "DeepSpeed console"),
    (re.compile(r"\{'(?:loss|eval_loss)':"), "Hugging Face Trainer console"),
    (re.compile(r"step:\s+\d+\s+loss:.*(?:tps|wps):"), "torchtitan console"),
    (re.compile(r"consumed_tokens:.*lm_loss:"), "nanotron console"),
    (re.compile(r"iter time: .*ms"), "litgpt console"),
    (re.compile(r"Progress on:\s*train"), "levanter console"),
    (re.compile(r"^\d+ (?:train|val|hella) "), "build-nanogpt log"),
    (re.compile(r"step:\d+ - .*(?:actor|critic)/"), "verl console"),
    (re.compile(r"mmengine|mmcv"), "mmengine console"),
)

_TIMES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_MAX_WAITING = 16
_MAX_KINDS = 1024
_MAX_LINE = 20_000  # characters that are looked at


@dataclass
class _Line:
    """What the scanner found on a line. names: of the counter and the loss as written, for kinds of lines."""

    point: Point
    counter: str = ""
    rank_of_counter: int = 99
    finer: tuple[str, int] | None = None  # a counter of batches beside that of steps
    loss: str = ""
    first: int = -1  # where the first measured number stands
    strays: int = 0  # numbers that mean nothing known
    bare: list[int] = field(default_factory=list)  # `10/100` without a name: (value, total)


class ConsoleParser:
    """Text of any training program, line by line. See the module's docstring for the rules."""

    def __init__(self) -> None:
        self.format = "console"
        self.remarks = Remarks(self.format)
        self._points = Points(self.remarks)
        self._columns = Columns(self.remarks)
        self._meanings: dict[str, Meaning | None] = {}
        self._confirmed: set[tuple[str, str]] = set()  # kinds of lines that are data
        self._waiting: dict[
            tuple[str, str], tuple[Point, int]
        ] = {}  # kind -> its first line, and rows given until then
        self._waiting_pair: Point | None = None  # first `train loss .., val loss ..`
        self._pairs_train = False  # such lines are the training loss as well
        self._iterations = False  # there are other training lines
        self._block: Point | None = None
        self._side: Point | None = None  # a counter with LR or skipped steps, without a loss
        self._rank: str | None = None
        self._other_ranks = 0
        self._silent = 0  # lines of other ranks since the kept one's last
        self._epoch: float | None = None
        self._counted_epoch = -1
        self._bar: tuple[int, int] | None = None
        self._finer = False
        self._last_counters: tuple[int, int] | None = None
        self._overflows = 0
        self._scale: float | None = None
        self._skipped_before: int | None = None
        self._inner = False  # fairseq: train_inner lines are the training lines

    def feed(self, line: str, number: int) -> list[Row]:
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        if "\0" in line:
            line = line.replace("\0", "")
        line = line.replace("\x08", "\r") if "\x08" in line else line
        if "\r" not in line:
            return self._part(line, number)
        rows: list[Row] = []
        for part in line.split("\r"):
            if part:
                rows += self._part(part, number)
        return rows

    def finish(self) -> list[Row]:
        rows = self._close_block()
        if self._other_ranks:
            note(self.remarks, f"{self._other_ranks} lines of ranks other than {self._rank} were left out")
            self._other_ranks = 0
        return rows + self._points.finish()

    # -- one line -----------------------------------------------------------------------------------------------

    def _part(self, text: str, number: int) -> list[Row]:
        if len(text) > _MAX_LINE:
            text = text[:_MAX_LINE]
        low = text.lower()
        if not any(mark in low for mark in _MARKS) and not _TABLE_LINE.match(text):
            if self._block is not None and text.strip():
                return self._pair(text, number) or []
            return []
        if "overflow" in low and _SKIPPED.search(text):
            self._overflow(text)
            return []
        if self._block is not None:
            rows = self._pair(text, number)
            if rows is not None:
                return rows
        rows = self._close_block()
        if _CODE.match(text) or 'f"' in text or "f'" in text or (self._inner and "| train |" in text):
            return rows
        if "| train_inner |" in text:
            self._inner = True
        table = _TABLE_LINE.match(text)
        if table:
            return rows + self._table_line(table, text, number)
        rank, body = self._rank_of(text)
        start = body.find('{"')
        record = parse_object(body[start:]) if start >= 0 and body.rstrip().endswith("}") else None
        found = self._scan_record(record, body[:start], number) if record is not None else self._scan(body, number)
        if found is None:
            return rows
        if rank is not None and not self._is_mine(rank, found):
            return rows
        return rows + self._take(found, body)

    def _take(self, found: _Line, text: str) -> list[Row]:
        """A scanned line: data, side information, the head of a block, or nothing."""
        point = found.point
        measured = bool({"loss", "grad_norm", "eval_loss"} & (point.values.keys() | point.evaluation.keys()))
        if not measured and not (point.nans or (point.refused and found.counter)):
            if point.step is not None and found.counter:
                if point.values or point.refused:
                    self._side = point
                elif len(text) < 240 and self._begins_block(found, text):
                    self._block = point
            return []
        if "loss" in point.values and "eval_loss" in point.evaluation:
            return self._train_and_validation(found, text)
        if point.values and self._side is not None:
            self._join(point)
        if point.values and self._overflows and "loss" in point.values:
            self._add_overflows(point)
        if "loss" in point.values:
            self._iterations = True
        kind = (found.counter, found.loss)
        if kind in self._confirmed or self._dialect(text) or (not point.values and self._confirmed):
            if len(self._confirmed) < _MAX_KINDS:
                self._confirmed.add(kind)
            return self._points.add(point)
        if point.step is None and point.values and any(counter for counter, _ in self._confirmed):
            return []  # a stray loss without a counter in a log whose lines have one
        waiting = self._waiting.pop(kind, None)
        if waiting is None:
            if len(self._waiting) >= _MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[kind] = point, self._points.rows_given
            return []
        self._confirmed.add(kind)
        first = self._points.add(waiting[0]) if waiting[1] == self._points.rows_given else []
        return first + self._points.add(point)

    def _dialect(self, text: str) -> bool:
        """True if the line is surely of a known program: no second one is needed."""
        for pattern, name in _FORMATS:
            if pattern.search(text):
                if self.remarks.format == "console":
                    self.remarks.format = name
                return True
        return False

    # -- scanning -----------------------------------------------------------------------------------------------

    def _scan(self, text: str, number: int) -> _Line | None:
        """The numbers of a line by their names."""
        found = _Line(Point(None, {}, line=number))
        point = found.point
        end, after_epoch = 0, False
        special = _PROGRESS.search(text) if "Progress on" in text else None
        if special:
            if special["what"] != "train":
                return None
            point.step = round(float(special["n"]) * (1000 if special["k"] else 1))
            found.counter, found.rank_of_counter = "progress", 0
        llmc = _LLMC.match(text)
        if llmc:
            point.step, found.counter, found.rank_of_counter = int(llmc["n"]), "s", 0
            end = llmc.end()
        opened = _OPENMM.search(text) if "Epoch(" in text or "Iter(" in text else None
        if opened:
            point.step, point.total = int(opened["n"]), int(opened["total"])
            point.epoch = float(opened["epoch"]) if opened["epoch"] else None
            found.counter, found.rank_of_counter = opened["what"], 0
            end = opened.end()
        bar = _BAR.search(text) if "%|" in text else None
        if bar:
            end = bar.end()
            seen = self._see_bar(bar)
            if seen is not None:
                self._bar = seen
                point.step, point.total = seen
                found.counter = "bar"
        plain: list[tuple[str, float]] = []
        for match in _NUMBER.finditer(text, end):
            words = text[end : match.start()]
            end = match.end()
            try:
                meaning = self._meanings[words]
            except KeyError:
                meaning = self._meaning(words)
            written, suffix, total = match.groups()
            if meaning is None:
                if (total and not words.strip(" \t[(:")) or (total and after_epoch):
                    found.bare = [int(float(written.replace(",", ""))), int(total)]
                found.strays += 1
                after_epoch = False
                continue
            after_epoch = False
            kind = meaning.kind
            value = float(written.replace(",", "") if "," in written else written)
            if suffix:
                value *= _TIMES[suffix]
            if kind == "step":
                self._count(found, meaning, words, value, total)
            elif kind == "epoch":
                if meaning.rank and text[end : end + 2].strip()[:1] != "[":
                    continue
                point.epoch, after_epoch = value, True
            elif kind == "skipped":
                point.refused = self._refused(value, words)
            elif kind == "nan_count":
                point.nans = int(value) if 0 < value < 1e9 else 0
            elif kind == "signal":
                if meaning.name == "loss":
                    if not found.loss:
                        found.loss = words.strip(_OPENERS + ",|")
                    elif meaning.rank >= self._meaning_rank(found.loss):
                        continue
                    else:
                        found.loss = words.strip(_OPENERS + ",|")
                elif meaning.name in point.values:
                    continue
                if found.first < 0:
                    found.first = match.start()
                value *= meaning.factor
                if meaning.name == "time_s" and meaning.rank == 8:
                    if text[end : end + 3].strip()[:2] != "ms":
                        continue  # a clock that runs on, or a unit that is not known
                    value /= 1e3
                point.values[meaning.name] = value
            elif kind == "evaluation":
                if meaning.name == "eval_loss" and "eval_loss" not in point.evaluation:
                    point.evaluation["eval_loss"] = value
                    found.loss = found.loss or words.strip(_OPENERS + ",|")
                elif meaning.name != "eval_loss":
                    plain.append((meaning.name, value))
        if point.evaluation:
            point.evaluation.update(plain)
        return self._finish_scan(found, text)

    def _finish_scan(self, found: _Line, text: str) -> _Line | None:
        """Counters without a name, evaluations by their line, kinds for lines without a loss."""
        point = found.point
        if point.step is None and found.bare:
            point.step, point.total = found.bare
            found.counter = "n/total"
        if point.epoch is None:
            point.epoch = self._epoch_of(text)
        else:
            self._epoch = point.epoch
        if point.values.keys() & {"loss"} and not point.evaluation:
            low = text[: max(found.first, 0)].lower()
            evaluation = any(word in low for word in _EVALUATIONS) and _EVALUATION.search(text, 0, max(found.first, 0))
            if evaluation and not re.search(r"\btrain(?:ing)?[ _]*loss", text[: found.first + 1], re.IGNORECASE):
                point.evaluation = {"eval_loss" if k == "loss" else f"eval_{k}": v for k, v in point.values.items()}
                point.values = {}
        if not found.loss:
            found.loss = ",".join(sorted(point.values.keys() | point.evaluation.keys()))
        if point.step is None and point.epoch is not None and (point.values or point.evaluation):
            self._count_epochs(found, text)
        if point.step is None and point.values:
            self._borrow(point, text)
        if self._finer_counter(found):
            assert found.finer is not None
            point.step = found.finer[1]
        return found

    def _count_epochs(self, found: _Line, text: str) -> None:
        """Epochs are the counter where no other was seen, and each is named once."""
        point = found.point
        assert point.epoch is not None
        if (
            point.epoch > self._counted_epoch
            and point.epoch == int(point.epoch)
            and "'epoch'" not in text
            and not any(counter not in ("", "epoch") for counter, _ in self._confirmed)
        ):
            point.step, point.epoch, found.counter = int(point.epoch), None, "epoch"
            self._counted_epoch = point.step
            note(self.remarks, "no step counter: epochs are counted")

    def _scan_record(self, record: dict[str, Any], before: str, number: int) -> _Line | None:
        """A JSON object in a console line."""
        if "[train_inner]" in before:
            self._inner = True
        if re.search(r"\[(?:valid|test)\w*\]", before):
            record = {**record, "split": "valid"}
        elif "[train]" in before and self._inner:
            return None
        point = self._columns.point(record, number)
        if point is None:
            return None
        if self.remarks.format == "console" and "[train_inner]" in before:
            self.remarks.format = "fairseq console"
        return _Line(point, "record" if point.step is not None else "", loss="record")

    def _count(self, found: _Line, meaning: Meaning, words: str, value: float, total: str | None) -> None:
        if not abs(value) < 1e15 or value < 0:
            return
        name = words.strip(_OPENERS + ",|")
        if meaning.rank in (3, 5) and found.rank_of_counter <= 2 and found.finer is None:
            found.finer = (name, round(value))
        if meaning.rank < found.rank_of_counter:
            if found.rank_of_counter in (3, 5) and found.point.step is not None:
                found.finer = (found.counter, found.point.step)
            found.point.step, found.point.total = round(value), int(total) if total else None
            found.counter, found.rank_of_counter = name[-40:], meaning.rank

    def _finer_counter(self, found: _Line) -> bool:
        """True if steps stand still while batches are counted on (gradient accumulation): then batches are the counter."""
        if found.finer is None or found.point.step is None:
            return False
        last, self._last_counters = self._last_counters, (found.point.step, found.finer[1])
        if not self._finer and last is not None and last[0] == found.point.step and found.finer[1] > last[1] >= last[0]:
            self._finer = True
            note(self.remarks, "several lines for each optimizer step: batches are counted, not steps")
        return self._finer

    def _meaning(self, words: str) -> Meaning | None:
        """What a number means, by the text since the number before it. None: nothing known."""
        try:
            return self._meanings[words]
        except KeyError:
            if len(self._meanings) > 4096:
                self._meanings.clear()
            found = self._meanings[words] = _meaning(words)
            return found

    def _meaning_rank(self, words: str) -> int:
        meaning = self._meaning(words)
        return 99 if meaning is None else meaning.rank

    # -- lines of known kinds -----------------------------------------------------------------------------------

    def _table_line(self, table: re.Match[str], text: str, number: int) -> list[Row]:
        """`10 train 3.2`, `10 val 3.1`, `10 hella 0.25`."""
        value = as_number(table["value"])
        if value is None:
            return []
        self._dialect(text.strip())
        point = Point(int(table["step"]), {}, line=number)
        if table["what"] == "train":
            point.values["loss"] = value
        else:
            point.evaluation["eval_loss" if table["what"] == "val" else "eval_hellaswag"] = value
        return self._points.add(point)

    def _train_and_validation(self, found: _Line, text: str) -> list[Row]:
        """`step 250: train loss 1.7, val loss 1.9`: two evaluations, unless nothing else gives the training loss."""
        point, rows = found.point, []
        self._dialect(text)
        known = (found.counter, found.loss) in self._confirmed
        if self._iterations:
            self._pairs_train = False
            point.evaluation["eval_train_loss"] = point.values["loss"]
            point.values = {}
            return self._points.add(point)
        train = Point(point.step, point.values, epoch=point.epoch, total=point.total, line=point.line)
        evaluation = Point(point.step, {}, dict(point.evaluation), line=point.line)
        if self._pairs_train or known:
            return self._points.add(train) + self._points.add(evaluation)
        if self._waiting_pair is None:
            self._waiting_pair = train
            return self._points.add(evaluation)
        self._pairs_train = True
        rows = self._points.add(self._waiting_pair)
        self._waiting_pair = None
        return rows + self._points.add(train) + self._points.add(evaluation)

    def _begins_block(self, found: _Line, text: str) -> bool:
        """A line that is little more than a counter: `[step=10/1000,epoch=0]`, `[batch=10/1000]:`, `Step 10:`."""
        if re.search(r"\[(?:step|batch|iter\w*)=[\d,]+", text):
            return True
        return not found.strays and len(_NUMBER.sub("", text).strip(" \t:=-[]()/#*|,.")) <= 24

    def _pair(self, text: str, number: int) -> list[Row] | None:
        """A `name=value` line inside a block: it belongs to the block. None: the block ends here."""
        pair = _PAIR.match(text)
        block = self._block
        if pair is None or block is None:
            return None
        meaning, value = meaning_of(pair["key"]), as_number(pair["value"].replace(",", ""))
        if meaning.kind == "step":
            return None
        if value is None:
            return []
        if meaning.kind == "signal":
            block.values.setdefault(meaning.name, value * meaning.factor)
        elif meaning.kind == "evaluation":
            block.evaluation.setdefault(meaning.name, value)
        elif meaning.kind == "own" and re.search(r"loss|norm", pair["key"], re.IGNORECASE):
            block.values.setdefault(pair["key"], value)
        return []

    def _close_block(self) -> list[Row]:
        block, self._block = self._block, None
        if block is None or not {"loss", "grad_norm", "eval_loss"} & (block.values.keys() | block.evaluation.keys()):
            return []
        self._iterations = self._iterations or "loss" in block.values
        if self.remarks.format == "console":
            self.remarks.format = "console, a block for each step"
        return self._points.add(block)

    # -- ranks --------------------------------------------------------------------------------------------------

    def _rank_of(self, text: str) -> tuple[str | None, str]:
        """(rank or None, the line without its prefix)."""
        match = _RANK.match(text)
        if match:
            rank = next((group for group in match.groups() if group), None)
            return rank, text[match.end() :]
        match = _SRUN.match(text)
        if match and re.search(r"step|iter|epoch|update|batch", text[match.end() :], re.IGNORECASE):
            return match[1], text[match.end() :]
        inside = _RANK_INSIDE.search(text) if "ank" in text or "RANK" in text else None
        return (inside["rank"], text) if inside else (None, text)

    def _is_mine(self, rank: str, found: _Line) -> bool:
        """True if the line is the kept rank's: the first that reports a loss, until it falls silent."""
        if "loss" not in found.point.values:
            return self._rank is None or rank == self._rank
        if self._rank is None or rank == self._rank:
            self._rank, self._silent = rank, 0
            return True
        self._silent += 1
        if self._silent > 4096:
            note(self.remarks, f"rank {self._rank} fell silent: rank {rank} was read from there on")
            self._rank, self._silent = rank, 0
            return True
        self._other_ranks += 1
        return False

    # -- counters of other lines --------------------------------------------------------------------------------

    def _epoch_of(self, text: str) -> float | None:
        if "poch" in text:
            match = _EPOCH_ONLY.match(text)
            if match:
                self._epoch = float(match[1])
        return self._epoch

    def _see_bar(self, bar: re.Match[str]) -> tuple[int, int] | None:
        """Count and total of a training bar; bars of other things (other total, a name of their own) are left alone."""
        n, total = int(bar["n"]), int(bar["total"])
        described = words_of(bar["desc"])
        epoch = re.search(r"epoch\D{0,3}(\d+)", bar["desc"], re.IGNORECASE)
        if epoch:
            self._epoch = float(epoch[1])
        elif described and not {"train", "training", "step", "steps", "iter", "iters", "progress"} & set(described):
            return None
        if EVALUATION_WORDS & set(described):
            return None
        if self._bar is not None and total != self._bar[1] and not epoch:
            return None
        return n, total

    def _borrow(self, point: Point, text: str) -> None:
        """A counter for a line that has none: of a progress bar, or of a line beside it."""
        if self._bar is not None:
            own = "%|" in text
            if own or self._bar[0] > (self._points.last_step or 0):
                point.step, point.total = self._bar
                if not own:
                    note(
                        self.remarks,
                        "steps were taken from the progress bar beside the lines; they may be a little behind",
                    )
                return
        if self._side is not None and self._side.step is not None and self._side.step > (self._points.last_step or 0):
            point.step = self._side.step

    def _join(self, point: Point) -> None:
        """Take over what a line beside it said of the same step."""
        side, self._side = self._side, None
        if side is not None and side.step == point.step:
            for name, value in side.values.items():
                point.values.setdefault(name, value)
            point.refused = max(point.refused, side.refused)

    # -- refused steps ------------------------------------------------------------------------------------------

    def _refused(self, value: float, words: str) -> int:
        """Steps refused since the last report: Megatron counts those, DeepSpeed's `skipped=` counts all so far."""
        if not 0 <= value < 1e9:
            return 0
        if "=" not in words:
            return int(value)
        before, self._skipped_before = self._skipped_before, int(value)
        return max(int(value) - before, 0) if before is not None else 0

    def _overflow(self, text: str) -> None:
        """A line that says that a step was skipped on an overflow."""
        if not _OVERFLOW.search(text):
            return
        rank = _RANK_INSIDE.search(text)
        if rank and rank["rank"] != "0":
            return
        self._overflows += 1
        scale = _REDUCED.search(text)
        if scale:
            self._scale = as_number(scale[1].rstrip("."))

    def _add_overflows(self, point: Point) -> None:
        # fairseq and Hugging Face count applied steps only or cannot tell which line it was: never more than the interval
        if "fairseq" not in self.remarks.format:
            point.refused = max(point.refused, self._overflows)
        else:
            point.values["skipped"] = float(self._overflows)
        if self._scale is not None:
            point.values.setdefault("loss_scale", self._scale)
        self._overflows, self._scale = 0, None


def _meaning(words: str) -> Meaning | None:
    """What the text before a number means."""
    text = words[-160:].rstrip(_OPENERS)
    text = _WRAPPER.sub("", text).rstrip(_OPENERS)
    group = _TRAILING_GROUP.search(text)
    qualifier = ""
    if group:
        text, qualifier = text[: group.start()].rstrip(_OPENERS), group[1]
    elif text.endswith(")"):
        text = text[:-1]
    text = _HARD.split(text)[-1].strip(" \t:=-*#>•\u00a0")
    text = _UNITS.sub("", text)
    if not text or len(text) > 100:
        return None
    if qualifier:
        text = f"{text} {qualifier}"
    meaning = meaning_of(text)
    if text.lower() in ("time", "dt", "step time", "iter time"):
        return Meaning("signal", "time_s", 8)
    if text.lower() in ("train", "training") and ":" in words:
        return Meaning("epoch", "epoch", 8)  # timm's `Train: 0 [  50/1251`
    if meaning.kind != "own":
        return meaning if meaning.kind != "ignore" else None
    if ":" in text:  # `train: loss`, `INFO:root:step`
        before, _, after = text.rpartition(":")
        meaning = meaning_of(after)
        if meaning.kind in ("signal", "step", "epoch", "evaluation"):
            if EVALUATION_WORDS & set(words_of(before)) and meaning.name == "loss":
                return Meaning("evaluation", "eval_loss")
            return meaning
    parts = text.split()
    if len(parts) > 1 and parts[-2].lower() not in _NO_STEP_AFTER:
        last = meaning_of(parts[-1])
        if last.kind in ("step", "epoch") and last.rank < 9:
            return last
        if last.kind == "signal" and last.name in ("lr", "loss_scale"):
            return last
        two = meaning_of(" ".join(parts[-2:]))
        if two.kind in ("signal", "step") and len(parts) > 2 and two.rank < 9:
            return two
    return None
