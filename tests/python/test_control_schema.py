"""What /openapi.json says of the control routes, held against a live service by schemathesis: no question of theirs is
answered with anything that the schema does not have, nor ends the service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
schemathesis = pytest.importorskip("schemathesis")
from control_fleet import Fleet  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

#: No answer is one of a server that has broken: 500 is what vLLM and FastDeploy say of calls out of order.
CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
SETTINGS = settings(
    max_examples=3,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Fleet]:
    fleet = Fleet("schema", timeout=0.3, model="tiny")
    yield fleet
    fleet.close()
    assert fleet.engine.torn == []


def test_no_question_is_answered_otherwise(served: Fleet) -> None:
    api = schemathesis.openapi.from_url(f"http://{served.control.endpoint}/openapi.json")
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) > 40
    for operation in operations:
        # What takes nothing cannot be asked wrongly.
        can_be_wrong = bool(operation.query) or bool(operation.body)
        for mode in list(schemathesis.GenerationMode) if can_be_wrong else [schemathesis.GenerationMode.POSITIVE]:

            @SETTINGS
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                response = case.call()
                case.validate_response(response, checks=CHECKS)
                assert response.status_code < 500 or response.text, response.status_code

            ask()


def test_it_still_serves(served: Fleet) -> None:
    client = served.client
    for target in ("/wake_up", "/resume"):
        client.post(target)
    assert client.get("/is_paused") == {"is_paused": False}
    assert served.engine.finish(served.engine.submit("last")).ended == "length"
