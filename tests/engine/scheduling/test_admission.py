"""How much memory admission reserves for output that is still to come."""

from __future__ import annotations

import pytest

from octavo_engine.scheduling.admission import AdmissionControl
from tests.fakes.requests import make_sequence


def test_the_more_often_preempted_the_more_is_reserved():
    admission = AdmissionControl()
    admission.ratio = 0.1
    sequence = make_sequence(10, max_num_tokens=170)
    reserves = []
    for times in range(6):
        sequence.num_preemptions = times
        reserves.append(admission.reserve(sequence))
    assert reserves == pytest.approx([1.0, 3.5, 6.0, 8.5, 10.0, 10.0])


def test_the_ratio_decays_to_its_floor():
    admission = AdmissionControl()
    for _ in range(10_000):
        admission.after_step()
    assert admission.ratio == pytest.approx(0.1)
    for _ in range(10_000):
        admission.after_preemption([])
    assert admission.ratio == 1.0
