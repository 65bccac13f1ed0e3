"""Every line format: what is read, that a cut file gives the first rows of the whole, that nothing crashes (S2, T2)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from resilient.logs.open import line_parser, open_log
from resilient.logs.rows import Row
from tests.logs.samples import SAMPLES, Expected


def write(path: Path, lines: list[str], end: str = "\n") -> Path:
    path.write_bytes(end.join([*lines, ""]).encode())
    return path


def parse(lines: list[str]) -> list[Row]:
    parser = line_parser(lines)
    rows = [row for number, line in enumerate(lines, 1) for row in parser.feed(line, number)]
    return rows + list(parser.finish())


def check(rows: list[Row], expected: Expected) -> None:
    assert [row.step for row in rows] == [step for step, _ in expected]
    for row, (_, values) in zip(rows, expected, strict=True):
        for name, value in values.items():
            assert row.values[name] == pytest.approx(value, nan_ok=True), (row, name)


def same(a: Row, b: Row) -> bool:
    return repr(a) == repr(b)


@pytest.mark.parametrize("name", SAMPLES)
def test_t2_a_format_is_recognised_and_read(name: str, tmp_path: Path) -> None:
    lines, training, evaluations = SAMPLES[name]
    log = open_log(write(tmp_path / "run.out", lines))
    rows = list(log.rows())
    check([row for row in rows if not row.evaluation], training)
    check([row for row in rows if row.evaluation], evaluations)
    assert log.remarks.format
    assert not any("eval_loss" in row.values for row in rows if not row.evaluation)


@pytest.mark.parametrize("name", SAMPLES)
def test_s2_a_cut_file_gives_the_first_rows_of_the_whole(name: str) -> None:
    """What the last row lacks is only what follows it in lines of the same step."""
    lines = SAMPLES[name][0]
    whole = parse(lines)
    for cut in range(len(lines) + 1):
        parser = line_parser(lines)
        rows = [row for number, line in enumerate(lines[:cut], 1) for row in parser.feed(line, number)]
        assert all(same(a, b) for a, b in zip(rows, whole, strict=False)) and len(rows) <= len(whole)
        held = list(parser.finish())
        assert len(held) <= 1 and len(rows) + len(held) <= len(whole), (cut, held)
        for row in held:  # several lines make it: some may be missing
            full = whole[len(rows)]
            assert row.step == full.step and row.evaluation == full.evaluation
            assert set(row.values) <= set(full.values)


@pytest.mark.parametrize("name", SAMPLES)
def test_t2_crlf_colours_and_zero_bytes_change_nothing(name: str, tmp_path: Path) -> None:
    lines = SAMPLES[name][0]
    rows = list(open_log(write(tmp_path / "a", lines)).rows())
    crlf = list(open_log(write(tmp_path / "b", lines, "\r\n")).rows())
    assert [repr(row) for row in crlf] == [repr(row) for row in rows]
    holes = [("\0" * 7 if i % 3 else "") + line for i, line in enumerate(lines)]
    assert [repr(row) for row in open_log(write(tmp_path / "c", holes)).rows()] == [repr(row) for row in rows]


def made(*lines: str) -> list[Row]:
    return parse(list(lines))


def test_br47_a_norm_of_zero_throughout_is_not_measured_and_the_file_says_so(tmp_path: Path) -> None:
    """BR-47, detection 1.15: 0.000 and -1.0 are what Megatron prints when it does not know."""
    lines = [
        f" iteration {s}/ 1000 | lm-loss: {8 - s / 10:.6E} | loss scale: -1.0 | grad norm: 0.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for s in range(1, 9)
    ]
    log = open_log(write(tmp_path / "a", lines))
    rows = list(log.rows())
    assert [row.values for row in rows] == [{"loss": pytest.approx(8 - s / 10)} for s in range(1, 9)]
    assert "not measured" in log.remarks.unread["grad_norm"] and "loss_scale" in log.remarks.unread


def test_s2_zeros_before_the_first_norm_are_absent_and_later_ones_only_if_plausible() -> None:
    norms = [0.0, 0.0, 1.5, 0.0, 0.4, 0.015, 0.0, 0.01]
    rows = made("step,loss,grad_norm,lr", *[f"{s},3.5,{n},0" for s, n in enumerate(norms)])
    assert [row.values.get("grad_norm") for row in rows] == [None, None, 1.5, None, 0.4, 0.015, 0.0, 0.01]
    assert all(row.values["lr"] == 0.0 for row in rows)  # lr 0 is data


def test_br05_a_loss_of_zero_beside_a_nan_norm_is_a_placeholder_the_norm_is_not() -> None:
    rows = made(
        *[
            f"{{'loss': {2.0 if s < 5 else 0.0}, 'grad_norm': {1.0 if s < 5 else 'nan'}, 'learning_rate': 1e-4, 'epoch': 0.1}}"
            for s in range(9)
        ]
    )
    assert [row.values.get("loss") for row in rows] == [2.0] * 5 + [None] * 4
    assert all(math.isnan(row.values["grad_norm"]) for row in rows[5:])


def test_a_loss_of_zero_throughout_leaves_rows_without_data() -> None:
    parser = line_parser(["step,loss,grad_norm"])
    rows = [row for i in range(6) for row in parser.feed("step,loss,grad_norm" if i == 0 else f"{i},0,0", i + 1)]
    assert [row.values for row in rows] == [{}] * 5 and set(parser.remarks.unread) == {"loss", "grad_norm"}


def test_nan_and_inf_that_the_run_logged_stay() -> None:
    rows = made("step,loss,grad_norm,val_loss", "1,2.5,1.0,", "2,nan,inf,", "3,nan,nan,nan", "4,2.5,NaN,")
    assert [repr(row.values["loss"]) for row in rows if not row.evaluation] == ["2.5", "nan", "nan", "2.5"]
    assert [repr(row.values["grad_norm"]) for row in rows if not row.evaluation] == ["1.0", "inf", "nan", "nan"]
    assert math.isnan(next(row for row in rows if row.evaluation).values["eval_loss"])


def test_refused_steps_and_stale_norms_of_megatron() -> None:
    """Detection 1.15: on an overflow step the norm of the step before is printed again."""

    def line(step: int, loss: str, scale: float, norm: str, skipped: int, nans: int = 0) -> str:
        return f" iteration {step:8d}/ 1000 | learning rate: 1.0E-04 | {loss}loss scale: {scale} | grad norm: {norm} | number of skipped iterations: {skipped:3d} | number of nan iterations: {nans:3d} |"

    rows = made(
        line(1, "lm loss: 1.0E+01 | ", 1024.0, "464441.887", 0),
        line(2, "", 512.0, "464441.887", 1),
        line(3, "", 512.0, "464441.887", 1, 1),
        line(4, "lm loss: 9.0E+00 | ", 512.0, "232220.25", 0),
        line(14, "lm loss: 8.0E+00 | ", 512.0, "232220.25", 3),
    )
    assert [row.applied for row in rows] == [True, False, False, True, True]
    assert [row.values.get("grad_norm") for row in rows] == [464441.887, None, None, 232220.25, 232220.25]
    assert "loss" not in rows[1].values and math.isnan(rows[2].values["loss"])  # the file says that it was NaN
    assert rows[4].values["skipped"] == 3.0


def test_norms_that_carry_the_loss_scale_are_remarked_on() -> None:
    lines = ["step,loss,grad_norm,loss_scale"]
    scale = 1024
    for s in range(1, 60):
        scale *= 2 if s % 20 == 0 else 1
        lines.append(f"{s},3.0,{0.43 * scale + s % 3:.3f},{scale}")
    parser = line_parser(lines)
    rows = [row for i, line in enumerate(lines, 1) for row in parser.feed(line, i)]
    assert len(rows) == 59 and all("grad_norm" in row.values for row in rows)
    assert any("loss scale" in text for text in parser.remarks.notes)


def test_overflow_lines_of_deepspeed() -> None:
    lines = []
    for s in range(1, 8):
        if s == 4:
            lines.append(
                "[2022-07-26 19:15:51,159] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"
            )
        lines += [
            f"[Rank 0] step={s}, skipped={0 if s < 4 else 1}, lr=[0.001], mom=[[0.9, 0.95]]",
            f"steps: {s} loss: {5 - s / 10:.4f} iter time (s): 1.2 samples/sec: 51.2",
        ]
    rows = made(*lines)
    assert [row.step for row in rows] == list(range(1, 8))
    assert [row.applied for row in rows] == [True, True, True, False, True, True, True]
    assert rows[3].values["loss_scale"] == 32768.0 and rows[0].values["lr"] == 0.001


def test_a_step_that_goes_back_stays_in_file_order_and_two_loggers_are_joined() -> None:
    rows = made("step,loss", "1,5", "2,4", "3,3.5", "2,4.1", "3,3.6")
    assert [(row.step, row.values["loss"]) for row in rows] == [(1, 5.0), (2, 4.0), (3, 3.5), (2, 4.1), (3, 3.6)]
    joined = made(
        *[line for s in range(1, 6) for line in (f"step {s} loss {5 - s / 10}", f"step {s} grad_norm {s / 10}")]
    )
    assert [(row.step, *sorted(row.values)) for row in joined if row.step > 2] == [
        (s, "grad_norm", "loss") for s in range(3, 6)
    ]


def test_prose_configuration_and_code_are_no_data() -> None:
    parser = line_parser([])
    for line in (
        "At step 100 the loss was 3.5, which is fine", "for step in range(100): loss = 2.0", "Namespace(lr=0.1, step=1, loss_scale=0, log_step=10)",
        "    step = 0; loss = 1e9", "best loss 2.1 at step 77", "loss: 3", "wandb: train/loss 2.31", "Epoch 3: saving model with val_loss 2.3",
    ):  # fmt: skip
        assert list(parser.feed(line, 1)) == []
    assert list(parser.finish()) == []


def test_several_lines_for_each_optimizer_step_are_counted_by_batches() -> None:
    """litgpt prints every micro-batch."""
    rows = made(
        *[
            f"Epoch 1 | iter {i} step {i // 4} | loss train: {9 - i / 10:.3f}, val: n/a | iter time: 300.20 ms (step) remaining time: 2:03:04"
            for i in range(1, 17)
        ]
    )
    assert [row.step for row in rows] == [0, *range(2, 17)]


def test_t2_our_own_steps_are_taken_as_they_stand() -> None:
    """Several starts, a torn line, null for NaN, and nothing taken for a placeholder."""
    rows = parse(SAMPLES["own"][0] + SAMPLES["own"][0])
    assert [row.attempt for row in rows] == [*range(1, 13), *range(1, 13)]
    assert [row.applied for row in rows[:6]] == [True, True, True, True, False, True]
    assert (
        math.isnan(rows[4].values["grad_norm"])
        and rows[0].values["logit_max"] == 0.0
        and rows[0].values["generation"] == 0.0
    )
    assert not {"ranks", "position", "stability", "drivers", "signal.level"} & rows[0].values.keys()


@pytest.mark.parametrize(
    "prefix", ["[rank{}]: ", "[default{}]:", "{}: ", "[1,{}]<stdout>:", "(Worker pid={}) ", "rank {} | ", "[Rank {}] "]
)
def test_of_several_ranks_the_first_is_kept(prefix: str) -> None:
    lines = [
        f"{prefix.format(rank)}step {s} loss {s / 10 + rank} grad_norm 1.0" for s in range(1, 8) for rank in (3, 0, 1)
    ]
    parser = line_parser(lines)
    rows = [row for i, line in enumerate(lines, 1) for row in parser.feed(line, i)]
    parser.finish()
    assert [(row.step, row.values["loss"]) for row in rows] == [(s, s / 10 + 3) for s in range(1, 8)]
    assert any("ranks" in text for text in parser.remarks.notes)


def test_counters_that_begin_again_with_each_epoch_are_continued() -> None:
    bars = [
        f"Epoch {e}:  {10 * i}%|█   | {i}/10 [00:10<01:30, 9.9it/s, v_num=0, train_loss={3 - e - i / 10:.2f}]"
        for e in (0, 1)
        for i in range(1, 11)
    ]
    keras = [
        x
        for e in range(1, 7)
        for x in (
            f"Epoch {e}/6",
            f"100/100 - 1s - loss: {3 - e / 10:.4f} - accuracy: 0.9 - val_loss: {2.5 - e / 10:.4f}",
        )
    ]
    timm = [
        f"Train: {e} [{i * 50:>4d}/1251 ({i:>3.0f}%)]  Loss: {6.9 - e - i / 100:.3f} (6.93)  LR: 1.000e-05  Data: 0.001"
        for e in (0, 1)
        for i in range(4)
    ]
    table = ["epoch,batch,loss"] + [f"{e},{b},{3 - e - b / 10}" for e in (1, 2) for b in range(4)]
    for lines, steps in [
        ([("\r").join(bars)], list(range(1, 21))), (keras, [100 * e for e in range(1, 7)]),
        (timm, [0, 50, 100, 150, 1251, 1301, 1351, 1401]), (table, list(range(8))),
    ]:  # fmt: skip
        assert [row.step for row in parse(lines) if not row.evaluation] == steps


def test_a_file_without_a_counter_is_numbered_and_says_so() -> None:
    lines = [f"loss: {3 - i / 10}" for i in range(5)]
    parser = line_parser(lines)
    assert [row.step for i, line in enumerate(lines, 1) for row in parser.feed(line, i)] == [1, 2, 3, 4, 5]
    assert any("numbered" in text for text in parser.remarks.notes)
